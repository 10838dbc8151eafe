"""`python -m loadplan`: what people and programs see of a plan file."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import loadplan
from loadplan import ParamMeta, Targets
from loadplan.__main__ import main
from loadplan.plan_files import open_plan

F32, BF16 = torch.float32, torch.bfloat16


def targets(layers: int = 1) -> Targets:
    live: dict[str, Tensor] = {}
    for layer in range(layers):
        live[f"layers.{layer}.qk"] = torch.zeros(8, 6, dtype=BF16)
        live[f"layers.{layer}.experts"] = torch.zeros(3, 4, 6)
    live["A"] = torch.zeros(3)
    live["scale"] = torch.zeros(2)

    def load(weights: object) -> None:
        for name, weight in weights:  # type: ignore[attr-defined]
            *at, last = name.split(".")
            if last == "q":
                live[f"{at[0]}.{at[1]}.qk"][:4].copy_(weight[4:8])
                live[f"{at[0]}.{at[1]}.qk"][6:].zero_()
            elif last == "k":
                live[f"{at[0]}.{at[1]}.qk"][4:6].copy_(weight)
            elif last == "w":
                live[f"{at[0]}.{at[1]}.experts"][int(at[2])].copy_(weight.t())
            elif last == "A_log":
                live["A"].copy_(-weight.exp())
            elif last == "s":
                live["scale"].fill_(weight.item())

    return Targets(live, load)


def metas(layers: int = 1, experts: int = 2) -> list[ParamMeta]:
    declared = []
    for layer in range(layers):
        at = f"layers.{layer}"
        declared += [ParamMeta(f"{at}.q", (12, 6), BF16), ParamMeta(f"{at}.k", (2, 6), BF16)]
        declared += [ParamMeta(f"{at}.{e}.w", (6, 4), BF16) for e in range(experts)]
    return [*declared, ParamMeta("A_log", (3,), F32), ParamMeta("s", (), F32)]


@pytest.fixture
def saved(tmp_path: Path) -> str:
    path = tmp_path / "small.loadplan"
    loadplan.plan_loads(targets(), metas()).save(path, tag="rank 1 of 8")
    return str(path)


Capture = pytest.CaptureFixture[str]
View = Callable[[Tensor], Tensor]


def test_inspect_prints_the_report(saved: str, capsys: Capture) -> None:
    assert main(["inspect", saved]) == 0
    said = capsys.readouterr().out
    assert f"{saved}: saved by loadplan {loadplan.__version__}, torch" in said
    assert "tag 'rank 1 of 8'" in said
    assert "4 targets; holds 2 operators, 1 constants, 0 premises" in said
    assert "load plan: 6 names" in said and "not written: 2 targets" in said


def test_inspect_shows_one_name_in_full(saved: str, capsys: Capture) -> None:
    assert main(["inspect", saved, "--name", "layers.0.q"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "layers.0.q: direct",
        "  bfloat16 [12, 6]; reads 48 bytes",
        "  reads [4:8, 0:6]",
        "  [4:8, 0:6] -> `layers.0.qk` [0:4, 0:6]",
        "    region: byte 0, [] items of 48, strides [] bytes, from byte 48, strides []",
    ]
    assert main(["inspect", saved, "--name", "layers.0.1.w"]) == 0
    said = capsys.readouterr().out
    assert "layers.0.1.w: derived (cast bfloat16 -> float32)" in said
    assert "[0:6, 0:4] -> `layers.0.experts` [1:2, 0:4, 0:6], transposed, cast " in said
    assert main(["inspect", saved, "--name", "A_log"]) == 0
    assert "  aten::neg of A_log -> `A` [0:3]\n" in capsys.readouterr().out
    assert main(["inspect", saved, "--name", "s"]) == 0
    assert "s: fallback (`aten::item` reads its value at test_command_line.py:" in (
        capsys.readouterr().out
    )


def test_inspect_as_json(saved: str, capsys: Capture) -> None:
    assert main(["inspect", saved, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["saved"]["tag"] == "rank 1 of 8"
    assert said["names"]["layers.0.q"]["kind"] == "direct"
    assert said["names"]["layers.0.q"]["reads"] == [[[4, 8], [0, 6]]]
    assert said["names"]["layers.0.q"]["lands"][0]["to_boxes"] == [[[0, 4], [0, 6]]]
    assert [target["name"] for target in said["targets"]][:2] == ["layers.0.qk", "layers.0.experts"]
    assert {item["source"] for item in said["nameless"]} == {"", "aten::neg of A_log"}
    assert main(["inspect", saved, "--json", "--name", "A_log"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["A_log"]


@pytest.mark.parametrize("layers", [1, 40])
def test_a_drawing_says_what_lands_where(layers: int, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "p.loadplan"
    loadplan.plan_loads(targets(layers), metas(layers)).save(path)
    out = tmp_path / "p.svg"
    assert main(["inspect", str(path), "--svg", str(out)]) == 0
    page = ElementTree.parse(out)
    texts = {element.text for element in page.iter("{http://www.w3.org/2000/svg}text")}
    if layers == 1:
        assert {"layers.0.qk", "layers.0.q", "A", "aten::neg of A_log", "constant"} <= texts
        assert "[4:8, 0:6] → [0:4, 0:6]   (direct, of [12, 6])" in texts
        assert "1 name goes through the loader" in texts
    else:
        assert {"layers.*.qk", "layers.*.experts", "layers.*.*.w"} <= texts
        assert len(texts) < 60, "a page that does not grow with the layers"
    assert main(["inspect", str(path), "--svg", str(out), "--target", "layers.0.*"]) == 0
    assert "layers.0.q" in out.read_text() and ">A<" not in out.read_text()


def test_diff_says_what_changed(saved: str, tmp_path: Path, capsys: Capture) -> None:
    other = tmp_path / "other.loadplan"
    loadplan.plan_loads(targets(), metas(experts=3)).save(other, tag="rank 1 of 8")
    assert main(["diff", saved, saved]) == 0
    assert capsys.readouterr().out == "the plans are equal\n"
    assert main(["diff", saved, str(other)]) == 1
    said = capsys.readouterr().out
    assert "names: 1 changed\n  `layers.0.2.w`\n    new\n    + bfloat16 [6, 4] derived" in said
    assert "uncovered: 1 changed" in said and "layers.0.experts" in said
    assert main(["diff", saved, str(other), "--json"]) == 1
    assert {change["what"] for change in json.loads(capsys.readouterr().out)} == {
        "names",
        "uncovered",
    }


def test_diff_sees_values_that_the_plan_holds(tmp_path: Path, capsys: Capture) -> None:
    def save(path: Path, value: float) -> str:
        live = {"p": torch.zeros(3)}
        model = Targets(live, lambda ws: [live["p"].fill_(value) for _ in ws])
        loadplan.plan_loads(model, {"w": ((3,), F32)}).save(path)
        return str(path)

    files = save(tmp_path / "a", 1.0), save(tmp_path / "b", 2.0)
    assert main(["diff", *files]) == 1
    assert "`held values`" in capsys.readouterr().out


# Equal boxes, and another element in each place.
@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (lambda w: w, lambda w: w.t(), "[0:4, 0:4] -> `p` [0:4, 0:4], transposed"),
        (lambda w: w, lambda w: w.flip(0), "[0:4, 0:4] -> `p` [0:4, 0:4], reversed"),
        (lambda w: w.exp(), lambda w: w.t().contiguous().exp(), "`order of elements`"),
    ],
)
def test_diff_sees_the_order_of_elements(
    before: View, after: View, words: str, tmp_path: Path, capsys: Capture
) -> None:
    def save(name: str, view: View) -> str:
        live = {"p": torch.zeros(4, 4)}
        model = Targets(live, lambda ws: [live["p"].copy_(view(w)) for _, w in ws])
        loadplan.plan_loads(model, {"w": ((4, 4), F32)}).save(tmp_path / name)
        return str(tmp_path / name)

    assert main(["diff", save("before", before), save("again", before)]) == 0
    capsys.readouterr()
    assert main(["diff", str(tmp_path / "before"), save("after", after)]) == 1
    assert words in capsys.readouterr().out


NAMES = ["a\nb", "\x1b[31mred", "\x00", "\x9bred", "\u202eeman", "<i>&", "\uffff"]


def test_names_that_would_move_a_cursor_are_written_as_numbers(
    tmp_path: Path, capsys: Capture
) -> None:
    """Names of a file that somebody else made.  Programs get them as they are."""
    live = {name: torch.zeros(2) for name in NAMES}

    def load(weights: object) -> None:
        for name, weight in weights:  # type: ignore[attr-defined]
            live[name].copy_(weight.exp())

    plan = loadplan.plan_loads(Targets(live, load), {name: ((2,), F32) for name in NAMES})
    file = str(tmp_path / "odd.loadplan")
    plan.save(file, tag="\x1b[0m")
    other = str(tmp_path / "other\x1b[0m.loadplan")
    loadplan.plan_loads(Targets(live, load), {name: ((2,), F32) for name in NAMES[1:]}).save(other)
    drawing = tmp_path / "odd.svg"
    shown = [plan.report()]
    for arguments in (
        ["inspect", file],
        ["inspect", file, "--name", NAMES[1]],
        ["inspect", file, "--name", "\x1b[0m is no name"],
        ["inspect", file, "--svg", str(drawing)],
        ["diff", file, other],
    ):
        main(arguments)
        out = capsys.readouterr()
        shown += [out.out, out.err]
    for text in shown:
        assert not set(text) & {"\x1b", "\x00", "\x9b", "\u202e"}, text
        assert "a\nb" not in text
    assert r"a\x0ab, \x1b[31mred, \x00, \x9bred, \u202eeman, <i>&" in shown[0]
    ElementTree.parse(drawing)
    main(["inspect", file, "--json"])
    assert set(json.loads(capsys.readouterr().out)["names"]) == set(NAMES)


def test_errors_are_one_line(saved: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "no").write_text("no plan")
    for arguments, words in (
        (["inspect", str(tmp_path / "no")], "this is no plan file"),
        (["inspect", str(tmp_path / "none")], "No such file"),
        (["inspect", saved, "--name", "x"], "`x` was not declared"),
        (
            ["inspect", saved, "--svg", str(tmp_path / "x"), "--target", "x"],
            "no target of the plan",
        ),
        (["inspect", saved, "--target", "x"], "give --svg OUT too"),
        (["inspect", saved, "--svg", "x", "--json"], "leave out --json, or call twice"),
        (["inspect", saved, "--svg", "x", "--name", "A_log"], "leave out --name"),
    ):
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert said.startswith("loadplan: ") and words in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "name, words",
    [
        ("0.q", "was not declared when the plan was made; names like it: `layers.0.q`\n"),
        ("layers.*.w", "names like it: `layers.0.0.w`, `layers.0.1.w`\n"),
        ("layers.0.qq", "names like it: `layers.0.q`"),
        ("x", "was not declared when the plan was made\n"),
    ],
)
def test_a_name_that_is_not_there(saved: str, name: str, words: str, capsys: Capture) -> None:
    for arguments in ([], ["--json"]):
        assert main(["inspect", saved, "--name", name, *arguments]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("filled", [True, False])
def test_a_tied_target_is_no_gap(filled: bool, tmp_path: Path, capsys: Capture) -> None:
    embed = torch.zeros(4, 2)
    tied = Targets(
        {"embed": embed, "head": embed}, lambda ws: [embed.copy_(w) for n, w in ws if n == "e"]
    )
    plan = loadplan.plan_loads(tied, [ParamMeta("e" if filled else "f", (4, 2), F32)])
    plan.save(tmp_path / "p")
    assert main(["inspect", str(tmp_path / "p")]) == 0
    assert "2 targets in 1 storages; holds" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "p"), "--svg", str(tmp_path / "p.svg")]) == 0
    drawn = (tmp_path / "p.svg").read_text()
    assert ("the same bytes as embed, see there" in drawn) == filled
    assert ("nothing of its own that the plan writes" in drawn) != filled


def test_a_reader_may_stop(saved: str) -> None:
    command = [sys.executable, "-m", "loadplan", "inspect", saved, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


def test_a_plan_without_a_model_can_be_asked_and_not_used(saved: str) -> None:
    plan, _ = open_plan(saved)
    assert plan.get_boxes("layers.0.q") == (((4, 8), (0, 6)),)
    with pytest.raises(RuntimeError, match="opened without a model; use `load_plan`"):
        plan.get_dest("layers.0.q")
    with pytest.raises(RuntimeError, match="opened without a model"):
        plan.save(saved)
