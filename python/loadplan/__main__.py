"""The command line: ``python -m loadplan inspect FILE`` and ``python -m loadplan diff A B``."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ._inspect import differences, json_lines, names_like, overview, plan_of_name, printable
from .plan_files import open_plan


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadplan", description="Looks at plan files.")
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="report, one name in full, a drawing")
    inspect.add_argument("file", help="what `plan.save` wrote")
    inspect.add_argument("--name", help="a checkpoint tensor: its boxes and where they land")
    inspect.add_argument("--json", action="store_true", help="everything, for programs")
    inspect.add_argument("--svg", metavar="OUT", help="draw what lands where")
    inspect.add_argument("--target", metavar="T", help="draw only targets like this (*, ?)")
    diff = commands.add_parser("diff", help="what changed; exit status 1 where anything did")
    diff.add_argument("a", help="a plan file, before")
    diff.add_argument("b", help="another, after")
    diff.add_argument("--json", action="store_true", help="the same, for programs")
    return parser


def _print(text: str) -> None:
    """In colours on a terminal, where rich is installed; else as it is."""
    if sys.stdout.isatty():
        try:
            from ._inspect import printed_by_rich

            return printed_by_rich(text)
        except ImportError:
            pass
    print(text)


def _inspect(args: argparse.Namespace) -> int:
    plan, info = open_plan(args.file)
    if args.name is not None and args.name not in plan.entries:
        raise ValueError(
            f"`{args.name}` was not declared when the plan was made{names_like(plan, args.name)}"
        )
    if args.target is not None and args.svg is None:
        raise ValueError("--target says what to draw; give --svg OUT too")
    if args.svg is not None and (args.json or args.name is not None):
        other = "--json" if args.json else "--name"
        raise ValueError(f"--svg draws and prints nothing; leave out {other}, or call twice")
    if args.svg is not None:
        from ._drawing import draw

        Path(args.svg).write_text(draw(plan, Path(args.file).name, args.target), encoding="utf-8")
        print(f"drawn into {args.svg}")
    elif args.json:
        print("\n".join(json_lines(plan, info, args.name)))
    elif args.name is not None:
        _print(plan_of_name(plan, args.name))
    else:
        _print(overview(plan, info, args.file))
    return 0


def _diff(args: argparse.Namespace) -> int:
    found = differences(open_plan(args.a), open_plan(args.b))
    if args.json:
        print(json.dumps([change._asdict() for change in found], indent=1))
    elif not found:
        print("the plans are equal")
    else:
        from ._inspect import diff_text

        _print(diff_text(found, args.a, args.b))
    return 1 if found else 0


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        status = _inspect(args) if args.command == "inspect" else _diff(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Who reads (`| head`) has seen enough; what is still to be flushed goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        text = error.args[0] if isinstance(error, KeyError) else error
        words = "\n".join(map(printable, str(text).split("\n")))
        print(f"loadplan: {words}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    gc.disable()  # millions of tuples, all of them alive to the end
    sys.exit(main())
