"""Answers rewritten by the target: in process and by a server, interrupted, refused, and read back as training data."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import signal
import string
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_dist.commands import regenerate_command
from dflash_dist.config import Config, TargetConfig, load_config
from dflash_dist.data import regenerate
from dflash_dist.data.chat import prompt_ids, supervised_runs
from dflash_dist.data.prepare import prepare
from dflash_dist.data.regenerate import Sampling
from dflash_dist.data.regenerate_server import ServerWriter
from dflash_dist.data.regenerate_target import KeyedNoise
from dflash_dist.data.store import TokenStore
from dflash_dist.errors import RunFailed, UserError
from dflash_dist.evaluate.speculate import plain_decode
from dflash_dist.target.load import load_full, load_tokenizer
from tests import tiny

GREEDY = Sampling(temperature=0, max_new_tokens=14)
END = 258


def speaking_target(folder: Path, kind: str = "qwen3") -> Path:
    """A tiny target that says letters only, and ends its turns now and then."""
    tiny.make_target(kind, folder)
    model = load_full(folder, TargetConfig(model=str(folder)), torch.device("cpu"))
    alphabet = [load_tokenizer(folder).convert_tokens_to_ids(letter) for letter in string.ascii_letters]
    head = model.get_output_embeddings().weight
    silent = torch.ones(len(head), dtype=torch.bool)
    silent[[*alphabet, END]] = False
    head[silent] = 0
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def config(target: Path, tmp_path: Path) -> Config:
    return load_config(tiny.make_config(tmp_path, target, tiny.make_chats(tmp_path / "chats.jsonl", rows=22)))


def run(config: Config, out: Path, sampling: Sampling = GREEDY, batch: int = 2) -> None:
    regenerate_command(config, out, sampling, None, None, batch, "cpu")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def report(out: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(out.with_name(out.name + ".settings.json").read_text(encoding="utf-8"))
    return record["report"]


@pytest.mark.parametrize("kind", ["qwen3", "hybrid"])
def test_greedy_answers_are_those_of_decoding_alone(kind: str, tmp_path: Path) -> None:
    folder = speaking_target(tmp_path / "target", kind)
    chats = tiny.make_chats(tmp_path / "chats.jsonl", rows=12)
    config = load_config(tiny.make_config(tmp_path, folder, chats))
    run(config, tmp_path / "new.jsonl", batch=3)
    model = load_full(folder, config.target, torch.device("cpu"))
    tokenizer = load_tokenizer(folder)

    expected = []
    cut = 0
    for row in rows(chats):
        messages: list[dict[str, Any]] = []
        for question in row["messages"][::2]:
            ids = prompt_ids(tokenizer, [*messages, question], {})
            new = plain_decode(model, ids, GREEDY.max_new_tokens, {END}).ids
            if new[-1] != END or len(new) == 1:
                cut += new[-1] != END
                break
            messages += [question, {"role": "assistant", "content": tokenizer.decode(new[:-1])}]
        if messages:
            expected.append({"id": row["id"], "messages": messages})
    assert rows(tmp_path / "new.jsonl") == expected
    made = report(tmp_path / "new.jsonl")
    assert (made["rows"], made["kept"]) == (12, len(expected))
    counts = [made[key].get("cut_at_max_new_tokens", 0) for key in ("ended_early", "rejected")]
    assert sum(counts) == cut > 0


def test_prepare_supervises_exactly_the_generated_tokens(config: Config, target: Path, tmp_path: Path) -> None:
    out = tmp_path / "new.jsonl"
    run(config, out)
    tokenizer = load_tokenizer(target)
    again = load_config(tmp_path / "tiny.yaml", [f"data.sources=[{out}]", "data.held_out_share=0"])
    store = TokenStore.open(prepare(again, target))
    kept = [row for row in rows(out) if max(len(m["content"]) for m in row["messages"][1::2]) > 0]
    assert len(store) == len(kept) > 5
    for number, row in enumerate(kept):
        documents = store.read(torch.tensor([number]).numpy())
        runs = zip(*supervised_runs(documents.supervised_T), strict=True)
        said = [tokenizer.decode(documents.tokens_T[begin:end]) for begin, end in runs]
        assert said == [message["content"] + "<|im_end|>" for message in row["messages"][1::2]]


def test_the_real_target_answers(smollm2_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "chats.jsonl"
    questions = ["What is the capital of France?", "Say hello."]
    source.write_text("".join(json.dumps({"messages": [{"role": "user", "content": q}]}) + "\n" for q in questions))
    config = load_config(tiny.make_config(tmp_path, smollm2_folder, source))
    run(config, tmp_path / "new.jsonl", Sampling(temperature=0, max_new_tokens=32))
    first, second = rows(tmp_path / "new.jsonl")
    assert (first["id"], second["id"]) == ("chats.jsonl:1", "chats.jsonl:2")
    assert "Paris" in first["messages"][1]["content"]
    assert not second["messages"][1]["content"].endswith("<|im_end|>")


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_killed_run_goes_on_to_the_same_file(config: Config, tmp_path: Path, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, max_new_tokens=14, seed=3)
    run(config, tmp_path / "whole.jsonl", sampling)
    out = tmp_path / "killed.jsonl"
    command = [sys.executable, "-m", "dflash_dist", "regenerate", "--config", str(tmp_path / "tiny.yaml")]
    command += ["--out", str(out), "--temperature", str(temperature), "--max-new-tokens", "14", "--seed", "3"]
    partial = out.with_name(out.name + ".partial")
    if temperature == 0:
        with subprocess.Popen([*command, "--batch", "2", "--device", "cpu"], stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and not (partial.exists() and partial.stat().st_size):
                pass
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        whole = partial.read_bytes()
    else:
        # What a kill within the second window leaves, in the middle of a line.
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("dflash_dist.data.regenerate._Progress.row_done", interrupt_after(11))
            run(config, out, sampling)
        whole = partial.read_bytes()
        assert whole.count(b"\n") == 11
    partial.write_bytes(whole + b'{"id": "torn')
    assert not out.exists()

    with pytest.raises(UserError, match=r"killed\.jsonl was begun with other settings \(top_p: 0\.8 -> 0\.5\); give"):
        run(config, out, Sampling(temperature=temperature, top_p=0.5, max_new_tokens=14, seed=3))
    run(config, out, sampling)
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert report(out) == report(tmp_path / "whole.jsonl")
    assert not partial.exists()


def interrupt_after(count: int) -> Any:
    def row_done(progress: Any) -> None:
        progress.done += 1
        if progress.done == count:
            raise KeyboardInterrupt

    return row_done


def test_a_complete_file_is_left_alone(config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new.jsonl"
    run(config, out)
    written = out.stat().st_mtime_ns
    run(config, out)
    assert "is complete already" in capsys.readouterr().err
    with pytest.raises(UserError, match="seed: 0 -> 1"):
        run(config, out, Sampling(temperature=0, max_new_tokens=14, seed=1))
    (tmp_path / "new.jsonl.settings.json").unlink()
    with pytest.raises(UserError, match="nothing says how it was made"):
        run(config, out)
    assert out.stat().st_mtime_ns == written


def test_samples_depend_on_seed_row_and_turn_not_on_the_batch(config: Config, tmp_path: Path) -> None:
    sampled = Sampling(temperature=2, top_p=1, top_k=0, max_new_tokens=14)
    run(config, tmp_path / "two.jsonl", sampled)
    run(config, tmp_path / "five.jsonl", sampled, batch=5)
    run(config, tmp_path / "other.jsonl", Sampling(temperature=2, top_p=1, top_k=0, max_new_tokens=14, seed=1))
    two, five, other = (rows(tmp_path / f"{name}.jsonl") for name in ("two", "five", "other"))
    assert two == five
    assert two != other
    assert sampled.key("a", 0) != sampled.key("a", 1) != sampled.key("b", 1)


def test_a_prompt_near_the_context_takes_no_room_from_the_rows_beside_it(target: Path, tmp_path: Path) -> None:
    context = 80
    folder = shutil.copytree(target, tmp_path / "target")
    settings = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": context}
    (folder / "config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(folder)

    def prompt_length(text: str) -> int:
        return len(prompt_ids(tokenizer, [{"role": "user", "content": text}], {}))

    long = next("x" * n for n in range(context) if prompt_length("x" * n) >= context - 4)
    questions = ["rain", "tea", "green", "river", "stone", "seven", "perhaps", "tomorrow", long]
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps({"messages": [{"role": "user", "content": q}]}) + "\n" for q in questions))
    config = load_config(tiny.make_config(tmp_path, folder, source))
    made = []
    for batch in (1, 9):
        out = tmp_path / f"{batch}.jsonl"
        run(config, out, Sampling(temperature=0, max_new_tokens=60), batch)
        made.append((rows(out), report(out)))
    assert made[0] == made[1]
    assert max(len(row["messages"][1]["content"]) for row in made[0][0]) > 4, "longer than the long prompt's room"


def test_noise_samples_the_softmax() -> None:
    probabilities_V = torch.tensor([0.5, 0.3, 0.2, 0.0])
    noise = KeyedNoise([1, 2], torch.device("cpu"))
    scores_RV = probabilities_V.log().expand(2, 4)
    drawn_NR = torch.stack([noise(torch.empty(0), scores_RV).argmax(-1) for _ in range(4000)])
    assert (drawn_NR[:, 0] != drawn_NR[:, 1]).any()
    counts_V = drawn_NR.flatten().bincount(minlength=4)
    expected_V = 8000 * probabilities_V[:3]
    assert counts_V[3] == 0
    assert float(((counts_V[:3] - expected_V) ** 2 / expected_V).sum()) < 13.8  # chi-square of 2 degrees, p = 0.001


def test_rows_that_cannot_be_answered_are_counted(target: Path, tmp_path: Path) -> None:
    ask = {"role": "user", "content": "rain"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "kettle"}]}
    chats = [
        [ask, {"role": "assistant", "content": "old"}, ask],
        [{"role": "assistant", "content": "old"}],
        [ask, call, {"role": "tool", "content": "hot"}],
        [{"role": "narrator", "content": "x"}],
        [{"role": "user", "content": "x" * 2000}],
        [{"role": "user", "content": "half a pair: \ud800"}],
    ]
    source = tmp_path / "chats.jsonl"
    lines = [json.dumps({"id": f"r{i}", "messages": chat}) for i, chat in enumerate(chats)]
    source.write_text("\n".join([*lines, "{broken"]) + "\n")
    config = load_config(tiny.make_config(tmp_path, target, source))
    out = tmp_path / "new.jsonl"
    run(config, out, Sampling(temperature=0, max_new_tokens=200))
    (row,) = rows(out)
    assert row["id"] == "r0"
    assert row["messages"][::2] == [ask, ask], "every question is answered, the last one too"
    assert "old" not in json.dumps(row)
    assert report(out)["rejected"] == dict.fromkeys(
        ["no_question", "tool_calls", "unknown_role", "prompt_too_long", "not_unicode", "broken_json"], 1
    )


class Server:
    """A chat server on this machine whose replies are given, as (status, body), before it begins to answer `echo`."""

    def __init__(self) -> None:
        self.replies: list[tuple[int, bytes]] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append(body)
                server.headers.append(dict(self.headers))
                status, reply = server.replies.pop(0) if server.replies else (200, server.echo(body))
                self.send_response(status)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    @staticmethod
    def echo(body: dict[str, Any], finish: str = "stop", **more: str) -> bytes:
        said = f"turn {len(body['messages'])}: {body['messages'][-1]['content']}"
        choice = {"message": {"role": "assistant", "content": said, **more}, "finish_reason": finish}
        return json.dumps({"choices": [choice]}).encode()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("dflash_dist.data.regenerate_server.FIRST_WAIT_S", 0.001)
    server = Server()
    yield server
    server.close()


def ask_server(config: Config, out: Path, server: Server, in_flight: int = 1) -> None:
    regenerate_command(config, out, Sampling(), server.url, "served", in_flight, "cpu")


def test_a_server_answers_each_turn_on_its_new_history(
    config: Config, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret-1234")
    server.replies = [(500, b"busy with secret-1234"), (200, b"<html>"), (200, b'{"choices": []}'), (429, b"slow down")]
    out = tmp_path / "new.jsonl"
    ask_server(config, out, server, in_flight=4)
    old, new = rows(tmp_path / "chats.jsonl"), rows(out)
    assert [row["id"] for row in new] == [row["id"] for row in old]
    for before, after in zip(old, new, strict=True):
        assert after["messages"][::2] == before["messages"][::2]
        for place in range(1, len(after["messages"]), 2):
            said = {"role": "assistant", "content": f"turn {place}: {before['messages'][place - 1]['content']}"}
            assert after["messages"][place] == said
    first = server.requests[0]
    asked = {key: first[key] for key in ("model", "temperature", "top_p", "top_k", "max_tokens")}
    assert asked == {"model": "served", "temperature": 0.7, "top_p": 0.8, "top_k": 20, "max_tokens": 4096}
    seeds = {(json.dumps(request["messages"]), request["seed"]) for request in server.requests}
    assert len({seed for _, seed in seeds}) == len(seeds) == sum(len(row["messages"]) // 2 for row in new)
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret-1234"}
    written = "".join(path.read_text() for path in tmp_path.glob("new.jsonl*"))
    assert "secret" not in written + capsys.readouterr().err


def test_the_tools_of_a_row_reach_the_server_and_the_output(config: Config, tmp_path: Path, server: Server) -> None:
    tools = [{"type": "function", "function": {"name": "kettle"}}]
    chats = rows(tmp_path / "chats.jsonl")[:2]
    chats[0]["tools"] = json.dumps(tools)
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    ask_server(config, tmp_path / "new.jsonl", server)
    assert [row.get("tools") for row in rows(tmp_path / "new.jsonl")] == [tools, None]
    turns = [len(chat["messages"]) // 2 for chat in chats]
    assert [request.get("tools") for request in server.requests] == [tools] * turns[0] + [None] * turns[1]


def test_the_target_reads_the_tools_of_a_row(target: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(target, tmp_path / "target")
    template = folder / "chat_template.jinja"
    template.write_text("{% if tools %}{{ raise_exception(tools[0].name) }}{% endif %}" + template.read_text())
    chats = tiny.make_chats(tmp_path / "chats.jsonl", rows=2)
    first, second = rows(chats)
    first["tools"] = [{"name": "kettle"}]
    chats.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    out = tmp_path / "new.jsonl"
    run(load_config(tiny.make_config(tmp_path, folder, chats)), out, Sampling(temperature=0, max_new_tokens=200))
    assert [row["id"] for row in rows(out)] == [second["id"]]
    assert report(out)["rejected"] == {"template_error": 1}


def test_no_limit_on_the_likeliest_tokens_is_said_to_the_server(config: Config, tmp_path: Path, server: Server) -> None:
    regenerate_command(config, tmp_path / "new.jsonl", Sampling(top_k=0), server.url, "served", 1, "cpu")
    assert {request["top_k"] for request in server.requests} == {-1}


def test_a_server_that_stays_broken_fails_the_run_and_a_later_one_goes_on(
    config: Config, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret-1234")
    out = tmp_path / "new.jsonl"
    good = [(200, server.echo({"messages": [{"content": "x"}]}))] * 4
    server.replies = good + [(503, b"no room for\n secret-1234")] * 6
    with pytest.raises(
        RunFailed, match=r"failed 6 times on row chat-\d+: HTTP 503 no room for \*\*\*; mend the server"
    ):
        ask_server(config, out, server)
    partial = out.with_name(out.name + ".partial").read_text().splitlines()
    before = len(server.requests)
    ask_server(config, out, server)
    assert [json.loads(line)["id"] for line in partial] == [row["id"] for row in rows(out)][: len(partial)]
    answered = {Sampling().key(row["id"], turn) for row in map(json.loads, partial) for turn in range(row["answers"])}
    assert answered
    assert answered.isdisjoint(request["seed"] for request in server.requests[before:])


@pytest.mark.parametrize("status", [302, 401, 404])
def test_a_server_that_refuses_everyone_is_a_users_error(
    config: Config, tmp_path: Path, server: Server, status: int
) -> None:
    server.replies = [(status, b"not for you")]
    with pytest.raises(UserError, match=f"refuses every request: HTTP {status} not for you; check --url, --model and"):
        ask_server(config, tmp_path / "new.jsonl", server)
    assert len(server.requests) == 1


def test_cut_refused_and_thoughtful_answers_of_a_server(config: Config, tmp_path: Path, server: Server) -> None:
    body = {"messages": [{"content": "x"}]}
    server.replies = [
        (400, b"prompt too long"),
        (200, server.echo(body, finish="length")),
        (200, server.echo(body, reasoning_content="hm")),
    ]
    config = load_config(
        tmp_path / "tiny.yaml", ["data.max_rows=3", "data.chat_template_kwargs={enable_thinking: true}"]
    )
    out = tmp_path / "new.jsonl"
    ask_server(config, out, server)
    (row,) = rows(out)
    assert row["messages"][1] == {"role": "assistant", "content": "turn 1: x", "reasoning_content": "hm"}
    assert report(out)["rejected"] == {"server_refused": 1, "cut_at_max_new_tokens": 1}
    assert server.requests[0]["chat_template_kwargs"] == {"enable_thinking": True}


def test_no_server_at_all_fails_after_the_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_dist.data.regenerate_server.FIRST_WAIT_S", 0.001)
    writer = ServerWriter("http://127.0.0.1:9/v1", "served", {}, GREEDY, 1)
    from dflash_dist.data.regenerate import Rewriting

    with pytest.raises(RunFailed, match=re.escape("http://127.0.0.1:9/v1/chat/completions failed 6 times on row a:")):
        list(writer.rewrite([Rewriting("a", [[{"role": "user", "content": "x"}]])], lambda: None))


def test_the_report_names_the_first_row_of_each_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of those that keep earlier answers and of those that are rejected, though they end for the same reason."""
    question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
    chats = [
        regenerate.Rewriting("early", messages=[question, answer], answers=1, ended="cut"),
        regenerate.Rewriting("gone", ended="cut"),
        regenerate.Rewriting("gone too", ended="cut"),
    ]
    out = tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl.settings.json").write_text("{}")
    with (tmp_path / "journal").open("w+b") as journal:
        journal.writelines(json.dumps(dataclasses.asdict(chat)).encode() + b"\n" for chat in chats)
        regenerate._finish(out, journal)
    said = capsys.readouterr().err
    assert "ended early 1 cut, first early" in said and "rejected 2 cut, first gone\n" in said
