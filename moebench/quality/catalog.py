"""Which lm-eval tasks a suite is made of, and where their data lie. Needs lm-eval; asks nothing."""

from __future__ import annotations

import difflib
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from moebench.config import QualityConfig
from moebench.errors import UsageError
from moebench.plugins import home
from moebench.quality import local

SUITES = ("none", "quick", "local", "opencompass5")
FORMATS = {".jsonl": "json", ".parquet": "parquet"}
FEWSHOT_SEED = 1234  # lm-eval's own


def opencompass5() -> list[dict[str, Any]]:
    """The benchmarks of the Edge0 paper and the task that stands for each."""
    return yaml.safe_load(resources.files("moebench.quality").joinpath("opencompass5.yaml").read_text())


def load(config: QualityConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """Tasks by name, ready to ask, and by task the filter whose answers count where it is not the first.

    Raises one line for what does not exist, cannot be reached or may not be run.
    """
    listed = {entry["task"]: entry for entry in opencompass5()}
    names = {"local": local.TASKS, "opencompass5": tuple(listed)}.get(config.suite) or _names(config.suite)
    if config.data_dir and not Path(config.data_dir).expanduser().is_dir():
        raise UsageError(f"quality.data_dir={config.data_dir} is no folder")
    near = tuple(entry["folder"] for entry in listed.values() if "folder" in entry)
    manager = _manager(config.data_dir, near)
    if not all(name in manager.task_index for name in names):
        manager = _everything(config.data_dir)
    tasks: dict[str, Any] = {}
    for name in names:
        if name not in manager.task_index:
            raise _unknown(name, manager.all_tasks)
        _require_limits(manager, name)
        tasks |= _load(manager, name, config.data_dir, listed.get(name, {}).get("fields"))
    _require_permission(tasks, config.unsafe_code)
    for task in tasks.values():
        if task.config.num_fewshot is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return tasks, {name: entry["filter"] for name, entry in listed.items() if "filter" in entry}


def _manager(data_dir: str, near: tuple[str, ...] = ()) -> Any:
    """What finds tasks: in moebench's own folder, in folders of lm-eval's tree (none named: in all of it), and in a
    user's folder.
    """
    import lm_eval.tasks

    tree = Path(lm_eval.tasks.__file__).parent
    folders = [Path(str(resources.files("moebench.quality"))) / "tasks", *(tree / name for name in near)]
    if data_dir:
        folders.append(Path(data_dir).expanduser())
    return lm_eval.tasks.TaskManager(include_path=folders, include_defaults=not near)


_everything = lru_cache(maxsize=4)(_manager)  # lm-eval's whole tree takes seconds to read


def _names(suite: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in suite.split(",") if name.strip()))
    for name in names:
        if name in SUITES:
            raise UsageError(f"quality={suite}: {name} is a suite, not a task; name it alone")
    return names


def _load(manager: Any, name: str, data_dir: str, fields: list[str] | None) -> dict[str, Any]:
    """The tasks behind one name, which may be a group's; their data from the user's folder where it has them."""
    found = _local_data(name, data_dir)
    try:
        index = manager.task_index  # load() hands no changes to the members of a group
        built = manager._factory.build(index[name], overrides=found or None, registry=index)
        loaded = manager.load(built if isinstance(built, list) else [built])["tasks"]
    except ImportError as error:
        raise UsageError(f"task {name} needs a package that is not here: {error}") from None
    except Exception as error:  # whatever a hub, a gate or a file leads the libraries to
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        if found:
            needs = f"; it needs the fields {', '.join(fields)}" if fields else ""
            raise UsageError(f"quality.data_dir: the data of task {name} do not fit it: {reason}{needs}") from None
        raise UsageError(
            f"the data of task {name} cannot be reached ({reason}); put a copy into DIR/{name}.jsonl or .parquet "
            "and say quality.data_dir=DIR"
        ) from None
    for task in loaded.values():
        if found and (task.config.num_fewshot or 0) > 0 and "fewshot" not in found["dataset_kwargs"]["data_files"]:
            raise UsageError(
                f"task {name} shows {task.config.num_fewshot} worked examples: put them into {name}.fewshot.jsonl or "
                f".parquet beside {name}'s items in {data_dir}"
            )
    return loaded


def _local_data(name: str, data_dir: str) -> dict[str, Any]:
    """What to change in a task so that it reads files instead of the hub; nothing where there are no files."""
    if name in local.TASKS:
        files = {"test": local.folder() / f"{name}.jsonl"}
    else:
        files = {}
        for split, stem in (("test", name), ("fewshot", f"{name}.fewshot")):
            for path in (Path(data_dir).expanduser() / f"{stem}{suffix}" for suffix in FORMATS):
                if data_dir and path.is_file():
                    files[split] = path
    if "test" not in files:
        return {}
    kinds = {FORMATS[path.suffix] for path in files.values()}
    if len(kinds) > 1:
        raise UsageError(f"quality.data_dir: items and worked examples of {name} must be of one format")
    return {
        "dataset_path": kinds.pop(),
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {split: str(path.resolve()) for split, path in files.items()},
            "cache_dir": str(home() / "cache" / "datasets"),
        },
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
        "fewshot_split": "fewshot" if "fewshot" in files else None,
    }


def _require_limits(manager: Any, name: str) -> None:
    """Refuse a task of lm-eval's tree that runs programs in lm-eval's own way."""
    from lm_eval.tasks._yaml_loader import load_yaml

    path = manager.task_index[name].yaml_path
    if path is None or "lm_eval" not in Path(path).parts:
        return
    if load_yaml(path, resolve_func=False, recursive=True).get("unsafe_code"):
        raise UsageError(
            f"task {name} would run programs without limits; humaneval_limited runs them in a process with limits"
        )


def _require_permission(tasks: dict[str, Any], allowed: bool) -> None:
    """Programs that a model writes run only where that was said."""
    unsafe = [name for name, task in tasks.items() if getattr(task, "UNSAFE_CODE", False)]
    if unsafe and not allowed:
        raise UsageError(
            f"task {unsafe[0]} runs programs that the model writes; allow it with quality.unsafe_code=true (in a "
            "process with limits on time, memory and files, without network)"
        )
    if allowed and not unsafe:
        raise UsageError("quality.unsafe_code has no effect: no task of the suite runs programs")


def _unknown(name: str, valid: list[str]) -> UsageError:
    near = ", ".join(difflib.get_close_matches(name, [*SUITES, *valid], n=5)) or "none"
    return UsageError(
        f"unknown quality suite or task {name!r}; suites: {', '.join(SUITES)}; near it among {len(valid)} tasks: "
        f"{near}; all: lm-eval ls tasks"
    )
