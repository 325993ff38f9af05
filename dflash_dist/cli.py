"""The command line: each command is a thin call into the library. Data goes to stdout, all else to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_dist.errors import RunFailed, UserError
from dflash_dist.installed import import_problem
from dflash_dist.streams import DataStream, LastingStream, open_closed_streams
from dflash_profiling.cli import app as profiling
from dflash_profiling.trace_file import TraceError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

ConfigOption = Annotated[Path, typer.Option("--config", help="YAML configuration; see configs/.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[section.key=value]...", help="Config overrides.")]
TopologyOption = Annotated[str, typer.Option("--topo", help="T-D such as 3-1, or xN such as x2; @nodes behind it.")]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda or auto.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


@app.callback()
def _options(debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False) -> None:
    """Train DFlash drafters for your own LLM."""
    if debug:
        os.environ["DFLASH_DIST_DEBUG"] = "1"


@app.command()
def check(
    config: Annotated[
        Path | None, typer.Option("--config", help="Also check that this configuration can run here, and its memory.")
    ] = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    overrides: Overrides = None,
) -> None:
    """Check this machine and a configuration.

    Says what this machine has, what the target would really run, and how to mend what is wrong; exit 1 on an error.
    """
    _check_device_name(device)
    if config is None and overrides:
        raise UserError(f"the override {overrides[0]!r} has nothing to change; give --config too")
    from dflash_dist.check import as_json as findings_json
    from dflash_dist.check import as_text, has_errors
    from dflash_dist.check import check as run_check
    from dflash_dist.check.config import check_config
    from dflash_dist.config import load_config

    settings = load_config(config, overrides or []) if config else None
    findings = run_check(settings, device)
    if settings:
        findings += check_config(settings, device)
    print(findings_json(findings) if as_json else as_text(findings))
    if has_errors(findings):
        raise SystemExit(1)


@app.command()
def prepare(config: ConfigOption, overrides: Overrides = None) -> None:
    """Turn chats into a token store; instant where nothing changed."""
    from dflash_dist.config import load_config
    from dflash_dist.data.prepare import prepare_with_report, print_report
    from dflash_dist.target.package import target_folder

    settings = load_config(config, overrides or [])
    folder = target_folder(settings.target.model, Path(settings.cache_dir))
    store, report = prepare_with_report(settings, Path(folder))
    print_report(report, store)
    print(store)


@app.command()
def probe(
    config: ConfigOption,
    budget: Annotated[
        list[int] | None,
        typer.Option("--budget", help="Tokens of a batch, once or more; schedule.token_budget by default."),
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Draw the weights; of the target read config.json alone.")
    ] = False,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    overrides: Overrides = None,
) -> None:
    """Measure the target's speed and memory here.

    A table of shapes of batches, the largest token budget, and the costs by which the schedule shares batches out.
    """
    _check_device_name(device)
    from dflash_dist.config import load_config
    from dflash_dist.probe import as_text
    from dflash_dist.probe import probe as run_probe

    settings = load_config(config, overrides or [])
    figures = run_probe(settings, budget or [settings.schedule.token_budget], device, random_weights)
    print(json.dumps(figures) if as_json else as_text(figures))


@app.command()
def regenerate(
    config: ConfigOption,
    out: Annotated[Path, typer.Option("--out", help="JSONL file to write, for data.sources; not overwritten.")],
    url: Annotated[str | None, typer.Option("--url", help="OpenAI-compatible server, up to /v1.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="The server's name of the target.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="0: greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option("--top-p", min=1e-6, max=1)] = 0.8,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="0: no limit.")] = 20,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, help="Of one answer; data.max_length by default.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    batch: Annotated[
        int, typer.Option("--batch", min=1, max=65536, help="Chats in a batch, or requests in flight.")
    ] = 16,
    max_rows: Annotated[int | None, typer.Option("--max-rows", min=1, help="Of each source.")] = None,
    device: DeviceOption = "auto",
    overrides: Overrides = None,
) -> None:
    """Rewrite the answers of the config's chats with the target.

    The same command goes on after a stop.
    """
    _check_device_name(device)
    from dflash_dist.commands import regenerate_command
    from dflash_dist.config import load_config
    from dflash_dist.data.regenerate import Sampling

    settings = load_config(config, [*(overrides or []), *([f"data.max_rows={max_rows}"] if max_rows else [])])
    sampling = Sampling(temperature, top_p, top_k, max_new_tokens or settings.data.max_length, seed)
    regenerate_command(settings, out, sampling, url, model, batch, device)
    print(out)


@app.command()
def inspect(
    config: ConfigOption,
    row: Annotated[int | None, typer.Option("--row", help="Row of the token store, from 0.")] = None,
    messages: Annotated[Path | None, typer.Option("--messages", help="JSON file of one chat instead.")] = None,
    drafter: Annotated[Path | None, typer.Option("--drafter", help="Exported drafter folder to try.")] = None,
    anchors: Annotated[str | None, typer.Option("--anchors", help="Token places in the row, such as 35,40.")] = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    overrides: Overrides = None,
) -> None:
    """Show a training row with its supervised tokens marked.

    With --drafter and --anchors also what that drafter makes of it.
    """
    _check_device_name(device)
    from dflash_dist.commands import inspect_command
    from dflash_dist.config import load_config

    inspect_command(load_config(config, overrides or []), row, messages, drafter, anchors, device, as_json)


@app.command()
def train(
    config: ConfigOption,
    topo: TopologyOption,
    run: Annotated[str | None, typer.Option("--run", help="Name of the run; the config's stem by default.")] = None,
    device: DeviceOption = "auto",
    allow_slow: Annotated[
        bool, typer.Option("--allow-slow", help="Train even if the environment check finds errors.")
    ] = False,
    init_from: Annotated[str | None, typer.Option("--init-from", help="Drafter folder to start from.")] = None,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="Start a world that failed again, so many times at most.")
    ] = 0,
    overrides: Overrides = None,
) -> None:
    """Train a drafter, then export and evaluate it.

    The same command goes on with a run that was stopped.
    """
    from dflash_dist.topology import parse_topology

    topology = parse_topology(topo)
    _check_device_name(device)
    from dflash_dist.config import load_config

    extra = [f"train.init_from={init_from}"] if init_from else []
    settings = load_config(config, [*(overrides or []), *extra])
    from dflash_dist.train.launch import train as run_train

    name = run or config.stem
    raise SystemExit(
        run_train(settings, topology, device, name, sys.argv[1:], allow_slow=allow_slow, max_restarts=max_restarts)
    )


@app.command(name="eval")
def evaluate(
    run: Annotated[
        Path | None, typer.Option("--run", help="Run folder, or its name under runs/; not with --drafter or --target.")
    ] = None,
    drafter: Annotated[
        Path | None, typer.Option("--drafter", help="Exported drafter folder; needs --target, not with --run.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Target folder, hub name or package:NAME; goes with --drafter.")
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", help="Of the run: last, best (least val_loss) or a step; else its export."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="JSONL file of chats, or .txt file with a prompt a line.")
    ] = None,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            "--chat-template-kwargs",
            metavar="JSON",
            help="Object such as '{\"enable_thinking\": false}', in place of the run's.",
        ),
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option("--max-new-tokens", min=1)] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 is greedy, the default.")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="Sample from this share of probability.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Sample from this many tokens; 0 is all.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the sampling.")] = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Measure tau by real speculative decoding.

    Of a run (--run R), or of any drafter (--drafter D --target T). Prompts are those that the run kept out of training,
    or the bundled ones for a drafter and a target. A line of a --prompts file is a JSON object:

    {"messages": [{"role": "user", "content": "..."}]}
    """
    _check_device_name(device)
    from dflash_dist.commands import evaluate_command
    from dflash_dist.evaluate.table import as_table

    given = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    kwargs = None if chat_template_kwargs is None else _json_object("--chat-template-kwargs", chat_template_kwargs)
    figures = evaluate_command(run, drafter, target, prompts, changes, kwargs, device, checkpoint)
    print(json.dumps(figures) if as_json else as_table(figures))


@app.command()
def export(
    run: Annotated[Path, typer.Option("--run", help="Run folder, or its name under runs/.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write; it must not exist.")],
    form: Annotated[str, typer.Option("--format", help="plain (z-lab, SGLang, vLLM) or speculators (vLLM).")] = "plain",
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", help="last, best (of least val_loss) or a step such as 100.")
    ] = "last",
) -> None:
    """Write a run's checkpoint as a drafter folder.

    Prints the folder and the commands that serve it.
    """
    if form not in ("plain", "speculators"):
        raise UserError(f"export format {form!r} is not known; use --format plain or --format speculators")
    from dflash_dist.commands import export_command

    for line in export_command(run, out, form, checkpoint):
        print(line)


profile = typer.Typer(no_args_is_help=True, help="Find out where the time goes.")
profile.registered_commands += profiling.registered_commands
app.add_typer(profile, name="profile")


@profile.command(name="run")
def profile_run(
    config: Annotated[Path | None, typer.Option("--config", help="YAML configuration of a fresh short run.")] = None,
    topo: Annotated[str | None, typer.Option("--topo", help="Topology of a fresh short run.")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps in the recorded window.")] = 4,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="After the window a step with Python stacks, in profile/stacks/.")
    ] = False,
    run: Annotated[str | None, typer.Option("--run", help="The running run, or the fresh one's name.")] = None,
    device: DeviceOption = "auto",
    overrides: Overrides = None,
) -> None:
    """Have every rank record a trace.

    --run alone: of the run that goes on under this name. --config and --topo: of a fresh short one. The traces lie in
    the run's profile/ folder, which is printed.
    """
    if config is None and topo is None and run is not None:
        if overrides or device != "auto":
            raise UserError("a run that goes on takes neither overrides nor --device")
        from dflash_dist.commands import window_command

        print(window_command(Path(run), steps, stacks))
        return
    if config is None or topo is None:
        raise UserError("give --run NAME for a run that goes on, or --config FILE and --topo T-D for a fresh short one")
    from dflash_dist.topology import parse_topology

    topology = parse_topology(topo)
    _check_device_name(device)
    from dflash_dist.commands import profile_command

    raise SystemExit(profile_command(config, topology, steps, stacks, run, device, overrides or []))


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{option} is {text!r}, but must be a JSON object such as '{{\"enable_thinking\": false}}'")
    return value


def _check_device_name(device: str) -> None:
    if device not in ("cpu", "cuda", "auto"):
        raise UserError(f"--device is {device!r}, but must be cpu, cuda or auto")


def main() -> None:
    """Entry point: a user's error is one line and exit code 2, a failed run or any other error 1, Ctrl-C 130."""
    # Read when torch is imported. Threads that spin while they wait slow evaluation on a shared machine severalfold.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    open_closed_streams()
    with contextlib.redirect_stderr(LastingStream(sys.stderr)), contextlib.redirect_stdout(DataStream(sys.stdout)):
        _run()


def _run() -> None:
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where its failure is told
    except (UserError, RunFailed) as error:
        _fail(error, 2 if isinstance(error, UserError) else 1)
    except TraceError as error:
        _fail(UserError(str(error)), 2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except ImportError as error:
        problem = import_problem(error)
        _fail(UserError(problem) if problem else error, 2 if problem else 1)
    except Exception as error:
        _fail(error, 1)


def _fail(error: Exception, code: int) -> None:
    """Prints the error once: on a rank that our launcher started, the launcher does."""
    if "DFLASH_DIST_DEBUG" in os.environ:
        traceback.print_exc()
    if "RANK" in os.environ:
        from dflash_dist.train.liveness import TOLD
        from dflash_dist.train.world import launched_here, record_failure

        record_failure(error)
        if launched_here() or TOLD in getattr(error, "__notes__", ()):
            raise SystemExit(code)
    line = " ".join(str(error).splitlines())
    if not isinstance(error, (UserError, RunFailed)):
        line = f"{type(error).__name__}: {line} (a bug, or input that we do not know; --debug shows where)"
    print(f"error: {line}", file=sys.stderr)
    raise SystemExit(code)
