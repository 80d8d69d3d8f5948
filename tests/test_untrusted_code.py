"""No code comes out of a file: what is installed neither unpickles, nor evaluates, nor trusts code of others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import moebench

ROOT = Path(__file__).parents[1]
FOLDERS = [Path(moebench.__file__).parent, ROOT / "systems", ROOT / "models", ROOT / "configs", ROOT / "scripts"]
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "runpy", "imp"}
CALLS = {"eval", "exec", "__import__", "compile"}  # of Python's own
OWN_FOLDER = "train.py"  # takes the tokenizer that ships beside it
OWN_PIPE = "isolate.py"  # what moebench says to its own child process, in a pipe that nobody else has
YAML = {"load", "safe_load", "safe_dump"}


def product() -> list[Path]:
    """Python files that are installed or shipped."""
    return sorted({path.resolve() for folder in FOLDERS for path in folder.rglob("*.py") if "build" not in path.parts})


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of a name or an attribute of one; empty for others."""
    if isinstance(node, ast.Attribute):
        return f"{head}.{node.attr}" if (head := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def faults(source: str, name: str) -> Iterator[str]:
    """What in a module could make code of data."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if name != OWN_PIPE:
                yield from (f"imports {one}" for one in names if one.split(".")[0] in MODULES)
        if not isinstance(node, ast.Call):
            continue
        called, words = dotted(node.func), {word.arg: word.value for word in node.keywords}
        if called in CALLS:
            yield f"calls {called}"
        if called == "torch.load" and not is_constant(words, "weights_only", True):
            yield "torch.load without weights_only=True"
        if called in ("np.load", "numpy.load") and not is_constant(words, "allow_pickle", False):
            yield "numpy.load without allow_pickle=False"
        if "trust_remote_code" in words and not is_constant(words, "trust_remote_code", False):
            yield "trust_remote_code"
        local = is_constant(words, "local_files_only", True) or None in words or name == OWN_FOLDER  # None: in **
        if called.endswith(".from_pretrained") and not local:
            yield "from_pretrained that may go to the network"
        if called.startswith("yaml.") and called.split(".")[1] not in YAML:
            yield f"calls {called}"
        if called == "yaml.load" and "Safe" not in ast.unparse(node) and "LOADER" not in ast.unparse(node):
            yield "yaml.load with another loader than the safe one"


def is_constant(words: dict[str | None, ast.expr], name: str, value: object) -> bool:
    return isinstance(found := words.get(name), ast.Constant) and found.value is value


def test_no_module_makes_code_of_data():
    found = [f"{path}: {fault}" for path in product() for fault in faults(path.read_text(), path.name)]
    assert not found
    assert len(product()) > 150


def test_each_fault_is_seen():
    planted = {
        "import pickle": "imports pickle",
        "from pickle import loads": "imports pickle",
        "eval('1')": "calls eval",
        "torch.load(file)": "torch.load without weights_only=True",
        "torch.load(file, weights_only=False)": "torch.load without weights_only=True",
        "np.load(file, allow_pickle=True)": "numpy.load without allow_pickle=False",
        "np.load(file)": "numpy.load without allow_pickle=False",
        "f(trust_remote_code=True)": "trust_remote_code",
        "f(trust_remote_code=asked)": "trust_remote_code",
        "AutoModel.from_pretrained(folder)": "from_pretrained that may go to the network",
        "yaml.unsafe_load(text)": "calls yaml.unsafe_load",
        "yaml.load(text, yaml.Loader)": "yaml.load with another loader than the safe one",
    }
    assert {line: next(faults(line, "x.py"), None) for line in planted} == planted
    for line in ("torch.load(f, weights_only=True)", "np.load(f, allow_pickle=False)", "yaml.load(t, yaml.SafeLoader)"):
        assert not list(faults(line, "x.py"))
