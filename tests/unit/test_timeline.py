"""The division of time against a definition that looks at every nanosecond."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_profiling.intervals import Intervals, difference, intersection, union
from dflash_profiling.timeline import PARTS, by_span, family_of, host_bound, split

END = 60
pairs = st.lists(st.tuples(st.integers(0, END), st.integers(0, 12)), max_size=9)


def intervals(drawn: list[tuple[int, int]]) -> Intervals:
    start_I, length_I = (np.array([pair[place] for pair in drawn], np.int64) for place in (0, 1))
    return union(start_I, np.minimum(start_I + length_I, END))


def moments(time: Intervals) -> set[int]:
    return {moment for start, end in zip(*time, strict=True) for moment in range(start, end)}


@given(pairs, pairs)
def test_sets_of_intervals_are_sets_of_moments(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    a, b = intervals(first), intervals(second)
    assert moments(a) == {m for start, length in first for m in range(start, min(start + length, END))}
    assert moments(intersection(a, b)) == moments(a) & moments(b)
    assert moments(difference(a, b)) == moments(a) - moments(b)
    for time in (a, intersection(a, b), difference(a, b)):
        assert time.total_ns == len(moments(time))
        assert (time.end_I > time.start_I).all() and (time.start_I[1:] >= time.end_I[:-1]).all()


@given(st.dictionaries(st.sampled_from(PARTS[:-1]), pairs), st.integers(0, 20), st.integers(30, END))
@settings(max_examples=200)
def test_each_moment_counts_once_in_the_most_useful_part(
    drawn: dict[str, list[tuple[int, int]]], start: int, end: int
) -> None:
    window = union(np.array([start]), np.array([end]))
    parts = {name: intervals(pairs) for name, pairs in drawn.items()}
    expected = dict.fromkeys(PARTS, 0)
    for moment in range(start, end):
        expected[next((name for name in PARTS if name in parts and moment in moments(parts[name])), PARTS[-1])] += 1
    divided = split(window, parts)
    assert divided.parts_ns == expected
    assert sum(divided.parts_ns.values()) == divided.window_ns == end - start


@given(st.data())
def test_time_counts_in_the_innermost_span(data: st.DataObject) -> None:
    spans: list[tuple[str, int, int]] = []

    def nest(low: int, high: int, depth: int) -> None:
        while high - low > 1 and depth < 4 and data.draw(st.booleans()):
            start = data.draw(st.integers(low, high - 1))
            end = data.draw(st.integers(start + 1, high))
            spans.append((data.draw(st.sampled_from("abc")), start, end))
            nest(start, end, depth + 1)
            low = end

    nest(0, END, 0)
    time = intervals(data.draw(pairs))
    expected: dict[str, int] = {}
    for moment in moments(time):
        holding = [
            (end - start, -place, name) for place, (name, start, end) in enumerate(spans) if start <= moment < end
        ]
        name = min(holding)[2] if holding else ""
        expected[name] = expected.get(name, 0) + 1
    shuffled = data.draw(st.permutations(spans)) if len({s[1:] for s in spans}) == len(spans) else spans
    totals = by_span(time, shuffled)
    assert {name: total for name, total in totals.items() if total} == expected
    assert sum(totals.values()) == time.total_ns


def test_idle_time_is_the_hosts_until_the_launch_of_the_kernel_that_ends_it() -> None:
    idle = union(np.array([10, 40, 70, 90]), np.array([20, 60, 80, 95]))
    # The first was launched late, the second early, the third by another clock after it had begun; none ends the last.
    kernel_start_K, launch_end_K = np.array([60, 20, 80, 96]), np.array([30, 18, 85, 91])
    late = host_bound(idle, kernel_start_K, launch_end_K)
    assert list(zip(*(x.tolist() for x in late), strict=True)) == [(10, 18), (70, 80)]


def test_kernels_are_known_by_their_names() -> None:
    names = {
        "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN": "matrix product",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>": "matrix product",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64": "matrix product",
        "triton_tem_fused_flex_attention_backward_1": "attention",
        "void flash_fwd_kernel<Flash_fwd_kernel_traits<256, 64, 64, 4>>": "attention",
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": "delta rule",
        "_convolution_kernel": "convolution",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": "reduction",
        "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>": "element-wise",
        "_adamw_kernel": "optimizer",
        "void lamb_stage_1": "optimizer",
        "void at::native::elementwise_kernel<direct_copy_kernel_cuda(){lambda(int)#1}>": "gather and scatter",
        "void at::native::vectorized_elementwise_kernel<4, AUnaryFunctor<float>{lambda(int)#1}>": "element-wise",
        "void fbgemm_gpu::split_embedding_codegen_forward_unweighted_kernel<float>": "gather and scatter",
        "void vllm::fused_add_rms_norm_kernel<vllm::_typeConvert<__nv_bfloat16>>": "norm",
        "void moe::dev::routingRenormalize::routingIndicesWarpKernel": "other",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "communication",
        "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>": "communication",
        "what is this": "other",
    }
    assert {name: family_of(name) for name in names} == names
