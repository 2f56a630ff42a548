"""Configuration: the YAML files of ``configs/`` composed with what the command line says, and objects built from the result.

A configuration is a plain dict. Its groups are the folders of ``configs/``; ``agent=NAME`` picks a file of one, ``agent.KEY=VALUE``
changes a value, ``+agent.KEY=VALUE`` adds one and ``experiment=NAME`` sets many at once. A node with ``_target_``, the dotted
path of a class or function, describes an object. All mistakes in a configuration are :class:`UserError`.
"""

import functools
import importlib
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import segment_env.errors
from agents import durable
from agents.escaping import printable
from segment_env.errors import UserError

ROOT_CONFIG = "config"
OPTIONAL_GROUPS = ("diagnostic", "experiment")


def find_folder() -> Path:
    """The library's folder of configurations: inside the package where it was installed, else at the root of the checkout."""
    package = Path(segment_env.errors.__file__).parent
    installed, checkout = package / "_configs", package.parent / "configs"
    return installed if installed.is_dir() else checkout


def load(overrides: Iterable[str] = (), folder: str | Path | None = None) -> dict[str, Any]:
    """Compose a configuration.

    Args:
        overrides: as on the command line, ``["agent=ppo", "train.steps=100"]``; the last of two that disagree holds.
        folder: of ``config.yaml`` and its groups; the library's own by default.

    Returns: the configuration, with all interpolations resolved and no value missing.
    """
    folder = Path(folder or find_folder()).resolve()
    if not (folder / f"{ROOT_CONFIG}.yaml").is_file():
        raise UserError(f"{folder} is no folder of configurations: it has no {ROOT_CONFIG}.yaml")
    parsed = [_parse(text) for text in overrides]
    groups = _groups(folder)
    for override in parsed:
        _check_choice(override, groups)
    try:
        config = OmegaConf.to_container(_compose(parsed, folder), resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        key = getattr(error, "full_key", None) or _one_line(error)
        raise UserError(f"{key} has no value: give it one with {key}=VALUE") from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        for override in parsed:
            _check_key(override, parsed, folder, groups)
        raise UserError(f"the configuration does not compose: {_one_line(error)}") from error
    return _with_string_keys(config)


def build(node: Any, **extra: Any) -> Any:
    """Build the object that a node with ``_target_`` describes, and the objects nested in it.

    The target may be anything that can be imported from the current folder or the path. ``extra`` are keyword arguments that a
    file cannot hold, such as a model: they reach the target as they are, and win over the node's own.
    """
    if not isinstance(node, dict):
        raise UserError(f"a node with a _target_ is needed where the configuration has {node!r}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a researcher's file hides no module
    _check_targets(node, extra)
    try:
        # in two steps: what is passed through instantiate() is merged into the node, and may be copied
        made = hydra.utils.instantiate(node, _partial_=True, _convert_="all")
        return functools.partial(made, **extra) if node.get("_partial_") else made(**extra)
    except (InstantiationException, TypeError, ValueError) as error:
        cause = error.__cause__ or error if isinstance(error, InstantiationException) else error
        if isinstance(cause, UserError) or not isinstance(cause, (InstantiationException, TypeError, ValueError)):
            raise cause from cause.__cause__
        frame = traceback.extract_tb(cause.__traceback__)[-1]
        where = f" ({Path(frame.filename).name}, line {frame.lineno})" if isinstance(cause, TypeError) else ""
        inner = re.search(r"call to target '([\w.]+)'", str(error))  # only in hydra's own errors, which wrap those of inner nodes
        raise UserError(f"{inner[1] if inner else node['_target_']} cannot be built: {_one_line(cause)}{where}") from cause


def save(config: dict[str, Any], path: str | Path, heading: str = "") -> None:
    """Write a configuration to a YAML file that :func:`read` reads back, under a comment that says ``heading``. Raises OSError."""
    comment = f"# {printable(heading)}\n" if heading else ""
    durable.write(Path(path), comment + OmegaConf.to_yaml(OmegaConf.create(config)))


def read(path: str | Path) -> dict[str, Any]:
    """Read a configuration that :func:`save` wrote."""
    try:
        config = OmegaConf.to_container(OmegaConf.load(path))
    except OSError as error:
        raise UserError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a configuration: {_one_line(error)}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a configuration: it holds a list, not keys with values")
    return _with_string_keys(config)


def differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The keys in which two configurations differ, each with both values, as part of a message; empty where there are none."""
    before, after = dict(leaves(old)), dict(leaves(new))
    keys = [key for key in {**before, **after} if before.get(key, "absent") != after.get(key, "absent")]
    return ", ".join(f"{key} was {before.get(key, 'absent')}, is {after.get(key, 'absent')}" for key in keys)


def leaves(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys, and their values as JSON writes them, which tells 1 from 1.0 and finds NaN equal to itself."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value)


def _compose(overrides: list[Override], folder: Path) -> DictConfig:
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(folder), version_base=None):
            return hydra.compose(ROOT_CONFIG, [override.input_line or "" for override in overrides])
    finally:
        GlobalHydra.instance().hydra = outer  # of a program that is itself run by hydra


def _with_string_keys(config: Any) -> dict[str, Any]:
    return {str(key): value for key, value in config.items()}


def _parse(text: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(text)
        if not override.key_or_group:
            raise HydraException("no key")
    except HydraException as error:
        quoted = "; a value with special characters needs quotes, as in KEY='\"a=b\"'" if "=" in text else ""
        raise UserError(f"cannot read {text!r}: it should be KEY=VALUE{quoted}") from error
    if override.is_hydra_override():
        raise UserError(f"{text!r} would configure hydra, which only composes configurations here")
    if override.is_sweep_override():
        raise UserError(f"{text!r} gives several values where one is needed; a list is written in brackets, as in KEY=[1,2]")
    return override


def _groups(folder: Path) -> dict[str, list[str]]:
    """The options of every group: the YAML files in its folder, without their suffix."""
    options: dict[str, list[str]] = {group: [] for group in OPTIONAL_GROUPS}
    for group in sorted(path for path in folder.iterdir() if path.is_dir()):
        options[group.name] = sorted(file.relative_to(group).with_suffix("").as_posix() for file in group.rglob("*.yaml"))
    return options


def _check_choice(override: Override, groups: dict[str, list[str]]) -> None:
    """Refuse an option that a group does not have."""
    group = override.key_or_group
    if group not in groups:
        return
    if override.type is not OverrideType.CHANGE or override.package is not None:
        raise UserError(f"{override.input_line}: a group can only be given another option, as in {group}=NAME")
    option = override.value()
    if option not in groups[group]:
        name = override.get_value_string()
        raise UserError(f"{group}={name}: there is no such {group}{_rather(name, groups[group])}")


def _check_key(override: Override, overrides: list[Override], folder: Path, groups: dict[str, list[str]]) -> None:
    """Refuse a key that the configuration, with the chosen options of its groups but nothing else changed, does not have."""
    key = override.key_or_group
    if key in groups or override.is_add() or override.is_force_add():
        return
    try:
        config = OmegaConf.to_container(_compose([other for other in overrides if other.key_or_group in groups], folder))
    except (HydraException, OmegaConfBaseException, yaml.YAMLError):
        return  # not the key's fault
    known = sorted({*_keys(config), *groups})
    if key in known:
        return
    parent, _, name = key.rpartition(".")
    siblings = {other for other in known if other.rpartition(".")[0] == parent}
    misspelt = {other.rpartition(".")[2]: other for other in siblings}
    elsewhere = [other for other in known if other.endswith(f".{name}")]
    near = [misspelt[match] for match in get_close_matches(name, misspelt, 1)] or get_close_matches(key, elsewhere, 1, cutoff=0)
    if not near and not siblings:
        near = get_close_matches(key, known, 1)
    suggestion = f"; did you mean {near[0]!r}?" if near else _choices(siblings or groups)
    raise UserError(f"{override.input_line}: there is no key {key!r}{suggestion}")


def _keys(config: Any, prefix: str = "") -> Iterator[str]:
    for key, value in config.items() if isinstance(config, dict) else ():
        yield f"{prefix}{key}"
        yield from _keys(value, f"{prefix}{key}.")


def _check_targets(node: Any, extra: dict[str, Any] | None = None) -> None:
    """Refuse targets that cannot be imported or called, and keywords that they do not take or lack; inner nodes first."""
    if isinstance(node, list):
        for item in node:
            _check_targets(item)
    if not isinstance(node, dict):
        return
    for value in node.values():
        _check_targets(value)
    if "_target_" not in node:
        if extra is not None:
            raise UserError(f"there is nothing to build here, '_target_' is missing beside {', '.join(node) or 'nothing'}")
        return
    path = node["_target_"]
    target = _locate(path)
    if not callable(target):
        raise UserError(f"_target_={path} is of type {type(target).__name__}: it should be a class or a function")
    parameters = _parameters(target)
    given = {key for key in [*node, *(extra or {})] if key not in ("_target_", "_args_", "_partial_", "_convert_", "_recursive_")}
    if parameters is None:
        return
    kinds = {parameter.kind for parameter in parameters}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for key in sorted(given - set(names)):
            raise UserError(f"{path} takes no keyword {key!r}{_rather(key, names)}")
    if not node.get("_args_") and not node.get("_partial_"):
        needed = [p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for key in needed:
            if key not in given:
                raise UserError(f"{path} needs a value for {key!r}, and was given {', '.join(sorted(given)) or 'none'}")


def _parameters(target: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """What a call of the target takes; None where that cannot be known.

    A class that hands keywords on to its base takes the base's too.
    """
    hidden = isinstance(target, type) and type(target).__call__ is not type.__call__  # by a metaclass, as TorchRL's environments are
    try:
        parameters = list(inspect.signature(target.__init__ if hidden else target).parameters.values())
    except (TypeError, ValueError):
        return None
    parameters = parameters[1:] if hidden else parameters
    makers = [vars(base)["__init__"] for base in target.__mro__[:-1] if "__init__" in vars(base)] if isinstance(target, type) else []
    for inherited in makers[1:]:
        if not parameters or parameters[-1].kind is not inspect.Parameter.VAR_KEYWORD:
            break
        names = {parameter.name for parameter in parameters[:-1]}
        base_parameters = list(inspect.signature(inherited).parameters.values())[1:]
        parameters = parameters[:-1] + [parameter for parameter in base_parameters if parameter.name not in names]
    return parameters


def _locate(path: Any) -> Any:
    """The object of a dotted path, whose modules are imported."""
    parts = path.split(".") if isinstance(path, str) else []
    if not all(part.isidentifier() for part in parts) or len(parts) < 2:
        raise UserError(f"_target_={path} is no dotted path such as package.module.Name")
    name = parts[0]
    try:
        found = importlib.import_module(name)
        for part in parts[1:]:
            name = f"{name}.{part}"
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(name)
    except ImportError as error:
        parent, _, child = name.rpartition(".")
        if parent and isinstance(error, ModuleNotFoundError) and error.name == name:
            public = [other for other in vars(sys.modules[parent]) if not other.startswith("_")]
            reason = f"there is no {child!r} in {parent}{_rather(child, public)}"
        else:
            reason = _one_line(error)
        raise UserError(f"_target_={path} cannot be imported: {reason}") from error
    except Exception as error:  # whatever a researcher's own file raises
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}, line {frame.lineno}"
        raise UserError(f"_target_={path} cannot be imported: {type(error).__name__}: {_one_line(error)} ({where})") from error
    return found


def _rather(wrong: str, known: Iterable[str]) -> str:
    """The end of a message: a near match if there is one, else all that would be right."""
    known = sorted(known)
    near = get_close_matches(wrong, known, 1)
    return f"; did you mean {near[0]!r}?" if near else _choices(known)


def _choices(known: Iterable[str]) -> str:
    return f"; choose from {', '.join(sorted(known))}" if known else ""


def _one_line(error: BaseException | str) -> str:
    """A message on one line, without the advice and the internals that hydra and omegaconf add below it."""
    lines = [line.strip() for line in str(error).splitlines()]
    noise = (
        "object_type=",
        "reference_type=",
        "See https://hydra",
        "Config search path:",
        "provider=",
        "Set the environment variable HYDRA_FULL_ERROR",
    )
    kept = [line for line in lines if line and not line.startswith(noise)]
    return " ".join(kept) or type(error).__name__
