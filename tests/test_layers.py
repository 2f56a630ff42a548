"""Which module may import which: the architecture as a table."""

import ast
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

# Lowest first. A module imports from its own line and from the lines above it, never from a line below. A pattern that ends in
# "*" covers a package; the bare name of a package is its __init__.py. The first line with a pattern that fits a module is its own.
LAYERS = [
    # segment_env
    ["segment_env.errors", "segment_env.boundaries", "segment_env.noise", "segment_env.batch", "segment_env.scorer"],
    ["segment_env.streams", "segment_env.streams.*", "segment_env.metrics", "segment_env.masking", "segment_env.closed_form"],
    ["segment_env.diagnostics", "segment_env.diagnostics.*"],
    ["segment_env.unroll"],
    ["segment_env.env", "segment_env.actor", "segment_env.collector", "segment_env.gym"],
    ["segment_env"],
    # models
    ["models.*"],
    ["models"],
    # agents: pure functions, modules, programs
    ["agents.totals", "agents.returns", "agents.advantages", "agents.estimators", "agents.statistics"],
    ["agents.sampling", "agents.policies", "agents.rules", "agents.rates", "agents.critics", "agents.hindsight", "agents.losses"],
    ["agents.text_rules", "agents.bpe", "agents.entropy", "agents.truth", "agents.routing", "agents.gumbel", "agents.rate_losses"],
    [
        *["agents.config", "agents.agent", "agents.loss_module", "agents.data", "agents.learner", "agents.training"],
        *["agents.checkpoint", "agents.durable", "agents.random_states", "agents.journal", "agents.interruption"],
        *["agents.micro_batches", "agents.ranks"],
        *[
            "agents.straight_through",
            "agents.calibration",
            "agents.windows",
            "agents.evaluation",
            "agents.assessment",
            "agents.harness",
            "agents.lm_eval_model",
            "agents.segmenting",
            "agents.generation",
            "agents.grid",
            "agents.costs",
            "agents.reach",
            "agents.tables",
            "agents.plots",
            "agents.compare",
            "agents.gradient_noise",
            "agents.credit",
            "agents.laboratory",
            "agents.variance",
            "agents.report",
            "agents.heat_map",
            "agents.anatomy",
            "agents.curves",
            "agents.pages",
            "agents.pictures",
            "agents.escaping",
            "agents.gradient_figures",
            "agents.bench",
            "agents.timing",
            "agents.estimate",
        ],
    ],
    ["agents"],
    ["agents.cli"],
]
ROOT = Path(__file__).parents[1]
PACKAGES = ("segment_env", "models", "agents")


def sources() -> dict[str, str]:
    """Source of every module of the packages, by its dotted name; a package's __init__.py goes by "package.__init__"."""
    files = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8") for path in files}


def imports(name: str, source: str, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every module of the packages that ``source`` imports, wherever in the file it does."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = name.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # `from package import module` imports the module; `from package import name` what the package itself is
            found = [full if (full := f"{base}.{alias.name}") in modules else base for alias in node.names]
        else:
            continue
        yield from ((node.lineno, module) for module in found if module.split(".")[0] in PACKAGES)


def violations(source_of: dict[str, str]) -> list[str]:
    """One line for every module that is not in the table, and for every import of a higher layer."""
    modules = {name.removesuffix(".__init__") for name in source_of}

    def layer(module: str) -> int | None:
        return next((i for i, patterns in enumerate(LAYERS) if any(fnmatchcase(module, pattern) for pattern in patterns)), None)

    problems = [f"{module} is in no layer: add it to LAYERS in tests/test_layers.py" for module in sorted(modules) if layer(module) is None]
    for name, source in source_of.items():
        importer = name.removesuffix(".__init__")
        for line, imported in imports(name, source, modules):
            mine, other = layer(importer), layer(imported)
            if mine is not None and other is not None and other > mine:
                problems.append(f"{importer}, line {line}, imports {imported} of a higher layer: {LAYERS[other]}")
    return problems


def test_no_module_imports_a_higher_layer() -> None:
    assert not (problems := violations(sources())), "\n" + "\n".join(problems)


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("segment_env.scorer", "import segment_env.unroll"),
        ("segment_env.scorer", "from segment_env.unroll import unroll"),
        ("segment_env.scorer", "from segment_env import unroll"),
        ("segment_env.scorer", "from . import unroll"),
        ("segment_env.scorer", "from .unroll import unroll"),
        ("segment_env.scorer", "from segment_env import anything"),
        ("segment_env.__init__", "from models.unet import UNet"),
        ("segment_env.__init__", "from agents import losses"),
        ("segment_env.unroll", "def later():\n    from segment_env.env import SegmentEnv"),
        ("models.unet", "import agents.training as training"),
        ("agents.returns", "from .losses import loss"),
        ("agents.losses", "from agents.training import train"),
        ("agents.training", "from agents.cli import main"),
        ("agents.unheard_of", ""),
    ],
)
def test_the_check_finds_a_planted_violation(importer: str, source: str) -> None:
    planted = {"segment_env.__init__": "", "segment_env.unroll": "", "agents.losses": "", "agents.training": ""} | {importer: source}
    (problem,) = violations(planted)
    assert problem.startswith(importer.removesuffix(".__init__"))


def test_the_check_allows_what_is_lower() -> None:
    allowed = {
        "segment_env.__init__": "from segment_env.unroll import unroll\nfrom . import unroll",
        "segment_env.unroll": "import torch\nfrom agentsmith import models\nfrom segment_env.scorer import Scorer",
        "models.unet": "from segment_env import scorer",
        "agents.cli": "from agents import training\nimport segment_env, models.unet",
    }
    assert violations(allowed) == []
