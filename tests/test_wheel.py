"""The wheel holds all that the library needs, and works far from a checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("segment_env", "models", "agents")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    # -P: the folder the command runs in is not importable
    done = subprocess.run(
        [sys.executable, "-P", *map(str, command)], cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # setuptools leaves its build folder beside pyproject.toml
    for name in (*PACKAGES, "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    target = wheel.parent / "site"
    pip = ["-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-index"]
    run(*pip, "--target", target, wheel, cwd=wheel.parent)
    return target


def test_the_wheel_holds_every_source_and_config_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    folders = (ROOT / "segment_env" / "data", ROOT / "agents" / "templates")
    expected |= {path.relative_to(ROOT).as_posix() for folder in folders for path in folder.glob("*") if path.is_file()}
    expected |= {f"segment_env/_configs/{path.relative_to(ROOT / 'configs').as_posix()}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert packed == expected


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("from agents import config; assert config.load([])['seed'] == 0; print(config.__file__)", id="configs"),
        pytest.param("from segment_env import streams; streams.moby_dick(); print(streams.__file__)", id="text"),
        pytest.param("from agents import pages; pages.templates().list_templates()[3]; print(pages.__file__)", id="templates"),
    ],
)
def test_installed_files_are_found(site: Path, tmp_path: Path, program: str) -> None:
    loaded_from = run("-c", program, cwd=tmp_path, PYTHONPATH=str(site)).strip()
    assert Path(loaded_from).is_relative_to(site)


def test_the_command_line_prints_its_help(site: Path, tmp_path: Path) -> None:
    assert "usage" in run("-m", "agents.cli", "--help", cwd=tmp_path, PYTHONPATH=str(site))
