"""`python -m dflash_dist` is `dflash-dist`; the launcher starts each rank this way."""

import gc
import sys

from dflash_dist.installed import import_problem

gc.set_threshold(100_000)  # imports make many objects and few cycles: looking for these took a seventh of the start


def main() -> None:
    """`cli.main`, or one line on what it needs and cannot import."""
    try:
        from dflash_dist.cli import main as run
    except ImportError as error:
        if not (problem := import_problem(error)):
            raise
        print(f"error: {problem}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
