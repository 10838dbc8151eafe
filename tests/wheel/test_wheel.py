"""The wheel in a virtual environment of its own: what users install, not what the build tree holds.

Torch comes from the environment that runs this test, through a path file, so that nothing is
downloaded.  Run by `./dev test-wheel`, which builds the wheel first.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import torch, loadplan
live = {"p": torch.zeros(2, 3)}
model = loadplan.Targets(live, lambda weights: [live["p"].copy_(w[2:]) for _, w in weights])
plan = loadplan.plan_loads(model, {"w": ((4, 3), torch.float32)})
plan.save("w.loadplan")
plan = loadplan.load_plan("w.loadplan", model)
loadplan.start_reload(model)
loadplan.load_planned(model, plan, [("w", torch.arange(12.0).view(4, 3))])
loadplan.finish_reload(model)
print(live["p"].tolist(), loadplan.__file__)
"""


@pytest.fixture(scope="module")
def wheel() -> Path:
    wheels = sorted((ROOT / "build/wheel").glob("*.whl"))
    assert len(wheels) == 1, "build one with ./dev wheel"
    return wheels[0]


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin/python"
    site = next(folder.glob("lib/python3*/site-packages"))
    (site / "torch.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps"]
    options = ["--no-index", "--quiet", "--disable-pip-version-check", "--ignore-installed"]
    subprocess.run([*command, *options, wheel], check=True)
    return python


def run(python: Path, folder: Path, *arguments: str) -> str:
    command = [python, "-I", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_plan_works_where_only_the_wheel_is(python: Path, tmp_path: Path) -> None:
    said = run(python, tmp_path, "-c", PROGRAM)
    assert said.startswith("[[6.0, 7.0, 8.0], [9.0, 10.0, 11.0]]")
    assert str(python.parent.parent) in said
    assert "1 name" in run(python, tmp_path, "-m", "loadplan", "inspect", "w.loadplan")


def test_the_library_finds_what_it_needs_beside_it(python: Path, tmp_path: Path) -> None:
    [library] = python.parent.parent.glob("lib/python3*/site-packages/loadplan/libloadplan.so")
    headers = subprocess.run(
        ["readelf", "-d", library], capture_output=True, text=True, check=True
    ).stdout
    assert "Library rpath: [$ORIGIN:$ORIGIN/../torch/lib]" in headers
    program = "import loadplan; print(open('/proc/self/maps').read())"
    maps = run(python, tmp_path, "-c", program).splitlines()
    loaded = {line.split()[-1] for line in maps if re.search("lib(absl|simdjson)", line)}
    assert loaded and all(Path(path).parent == library.parent for path in loaded)


def test_what_is_in_it(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "loadplan/__main__.py" in names and "loadplan/_built_for.py" in names
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    assert not [name for name in names if name.startswith(("tests/", "include/"))]
