"""The dispatcher and the plain commands: light to start, clear when wrong, honest about this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_fixtures import SmallSource

from moebench.budget import parse_budget, parse_bytes
from moebench.cli import COMMANDS, main
from moebench.commands.words import describe, parse
from moebench.errors import UsageError
from moebench.residency.policies import CAUSAL
from moebench.trace.format import load
from moebench.units import GIB


@pytest.fixture(autouse=True)
def hermetic(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEBENCH_PLUGINS", "")
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


HEAVY = ("torch", "transformers", "pandas", "hydra", "omegaconf", "mlx", "numba")


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["list", "-v"], ["nonsense"]])
def test_light_commands_import_nothing_heavy(words):
    code = (
        f"import sys; from moebench.cli import main; main({words!r}); print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_names_every_command_and_each_has_its_own(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"  {command} " in text
        assert main([command, "--help"]) == 0
        assert f"moebench {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["rnu"], "did you mean run?"),
        (["list", "sytems"], "did you mean systems?"),
        (["trace", "statz"], "did you mean stats?"),
        (["trace", "stats"], "needs path="),
        (["trace", "stats", "path=nowhere"], "nowhere"),
        (["trace", "import", "path=x", "out=y", "format=csv"], "experts=N"),
        (["trace", "import", "path=x", "out=y", "format=csv", "experts=4"], "model=NAME"),
        (["trace", "import", "path=x", "out=y", "model=toy"], "meta.json"),
        (["trace", "synth", "out=x", "skew=steep"], "skew=steep"),
        (["trace", "synth", "out=x", "model=olmoe-1b-7b", "layers=3"], "layers is given by model"),
        (["trace", "synth", "out=x", "top_k=9", "experts=8"], "top_k 9 <= experts 8"),
        (["trace", "synth", "out=x", "skew=nan"], "skew"),
        (["trace", "synth", "out=missing/x"], "no folder missing"),
        (["trace", "synth", "out=/proc/x"], "out=/proc/x"),
        (["trace", "synth", "out=."], "not the name of a file"),
        (["trace", "record", "out=missing/x"], "no folder missing"),
        (["trace", "import", "path=x", "out=missing/x"], "no folder missing"),
        (["calibrate", "out=missing/x.yaml"], "no folder missing"),
        (["calibrate", "dir=/nope"], "dir=/nope"),
        (["doctor", "path=/nope"], "path=/nope"),
        (["pack", "model=x"], "needs out="),
        (["pack", "model=x", "out=y"], "config.json"),
        (["pack", "model=x", "out=y", "quant=int5"], "int4, int8, none"),
        (["calibrate", "seconds=0"], "1 to 3600"),
        (["calibrate", "secs=3"], "did you mean seconds?"),
        (["doctor", "fast"], "KEY=VALUE"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(words, hint, capsys):
    assert main(words) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith("moebench: error: ")
    assert hint in line
    assert not list(Path().iterdir())


def test_no_command_is_wrong_use(capsys):
    assert main([]) == 2
    assert "usage" in capsys.readouterr().out


def test_the_list_shows_all_kinds_and_details_on_demand(capsys):
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    for name in ("slru", "m4pro", "qwen3.6-35b-a3b", "pread"):
        assert name in text
    assert main(["list", "models", "hardware", "-v"]) == 0
    detail = capsys.readouterr().out
    assert "1,769,472 bytes" in detail
    assert "transferred from m2_16gb" in detail
    assert "slru" not in detail


def test_the_list_shows_one_thing_in_full_by_its_name(capsys):
    assert main(["list", "bigmomo"]) == 0
    text = capsys.readouterr().out
    assert "system.tau=" in text
    assert "slru" not in text
    assert main(["list", "tinymoe", "m4pro"]) == 0
    text = capsys.readouterr().out
    assert "8 layers x 32 experts, top-4" in text
    assert "read_curve" in text
    assert main(["list", "models"]) == 0
    assert "tinymoe" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["list", "hardware"], ["doctor"]])
@pytest.mark.parametrize("content", [b"id: broken\n", b"[1]", b"", b"a: [", b"\xff\xfe", b"1: 2\nstack: []\n"])
def test_a_broken_profile_of_the_user_does_not_hide_the_others(command, content, tmp_path, capsys):
    folder = tmp_path / "home" / "hardware"
    folder.mkdir(parents=True)
    (folder / "broken.yaml").write_bytes(content)
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "m4pro" in shown.out or command == ["doctor"]
    (line,) = shown.err.splitlines()
    assert line.startswith("moebench: warning: ")
    assert "broken.yaml" in line


def test_the_doctor_says_what_is_missing_and_what_it_costs(capsys):
    assert main(["doctor"]) == 0
    findings = json.loads(capsys.readouterr().out.splitlines()[-1])["findings"]
    assert {"torch", "O_DIRECT", "io_uring", "fadvise", "drop_caches", "memory limit"} <= {f["name"] for f in findings}
    assert all(f["without"] for f in findings if not f["ok"])
    assert not [path for path in Path().iterdir() if path.name != "home"]


@pytest.mark.parametrize("name", ["experts.bin", "dense.safetensors"])
def test_packing_again_checks_every_byte_of_what_stands_there(name, monkeypatch, capsys):
    from moebench.checkpoint import open as opened

    monkeypatch.setattr(opened, "open_source", lambda folder, **options: SmallSource())
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    words = ["pack", "model=model", "out=made", "byte_layout=plain"]
    assert main(words) == 0
    assert main(words) == 0
    capsys.readouterr()
    with Path("made", name).open("r+b") as file:
        file.write(b"damage")
    assert main(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line
    assert "remove it and pack again" in line


def test_a_trace_is_replaced_whole_or_not_at_all(monkeypatch):
    words = ["trace", "synth", "out=a.safetensors", "layers=2", "sequences=1", "prefill=4", "decode=4"]
    assert main(words) == 0
    before = Path("a.safetensors").read_bytes()
    with monkeypatch.context() as patch:

        def fail(*_):
            raise OSError("the disk is gone")

        patch.setattr("moebench.scratch.os.fsync", fail)
        assert main([*words, "seed=1"]) == 1
    assert [path.name for path in Path().iterdir()] == ["a.safetensors"]
    assert Path("a.safetensors").read_bytes() == before
    assert main([*words, "seed=1"]) == 0
    assert Path("a.safetensors").read_bytes() != before


def test_a_synthetic_trace_is_written_and_described(capsys):
    words = ["model=olmoe-1b-7b", "sequences=1", "prefill=4", "decode=12", "seed=3"]
    assert main(["trace", "synth", "out=a.safetensors", *words]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (first["layers"], first["experts"], first["top_k"], first["tokens"]) == (16, 64, 8, 16)
    assert main(["trace", "stats", "path=a.safetensors"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tokens"] == 16
    assert main(["trace", "synth", "out=b.safetensors", *words[:-1], "seed=4"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["hash"] != first["hash"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "token,layer,experts\n0,0,1 2\n1,0,2 3\n"),
        ("a.jsonl", '{"token": 0, "layer": 0, "experts": [1, 2]}\n{"token": 1, "layer": 0, "experts": [2, 3]}\n'),
    ],
)
def test_a_recording_is_imported_under_the_name_of_its_model(capsys, name, text):
    Path(name).write_text(text)
    words = [f"path={name}", "out=t.safetensors", f"format={name.partition('.')[2]}", "experts=4", "model=toy"]
    assert main(["trace", "import", *words]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tokens"] == 2
    trace = load("t.safetensors")
    assert (trace.metadata["model"], trace.metadata["source"]) == ("toy", name)
    assert main(["trace", "import", *words[:1], "out=u.safetensors", *words[2:], "source=my lab"]) == 0
    assert load("u.safetensors").metadata["source"] == "my lab"


def test_statistics_hold_the_hit_rate_of_every_policy(capsys):
    assert main(["trace", "synth", "out=a.safetensors", "sequences=1", "prefill=4", "decode=60", "layers=3"]) == 0
    capsys.readouterr()
    assert main(["trace", "stats", "path=a.safetensors"]) == 0
    shown = capsys.readouterr().out.splitlines()
    rates = json.loads(shown[-1])["hit_rate"]
    assert set(rates) == {*CAUSAL, "belady", "belady_bypass"}
    for policy, by_share in rates.items():
        (line,) = [line for line in shown if line.split()[:1] == [policy]]
        assert line.split()[1:] == [f"{rate:.3f}" for rate in by_share.values()]
        assert list(by_share) == ["0.125", "0.25", "0.375", "0.5", "0.75"]
        assert all(rates["belady"][share] >= by_share[share] for share in by_share if policy in CAUSAL)


def test_hit_rates_are_counted_on_the_first_tokens_and_can_be_left_out(capsys):
    assert main(["trace", "synth", "out=a.safetensors", "sequences=1", "prefill=4", "decode=60", "layers=3"]) == 0
    found = {}
    for count in (0, 30, 1000):
        assert main(["trace", "stats", "path=a.safetensors", f"cached={count}"]) == 0
        found[count] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "hit_rate" not in found[0]
    assert (found[30]["hit_rate_tokens"], found[1000]["hit_rate_tokens"]) == (30, 64)
    assert found[30]["hit_rate"] != found[1000]["hit_rate"]
    assert main(["trace", "stats", "path=a.safetensors", "cached=-1"]) == 2
    assert main(["trace", "stats", "path=a.safetensors", "cached=0", "scope=shared"]) == 2
    assert main(["trace", "stats", "path=a.safetensors", "shares=0,0.5"]) == 2
    assert main(["trace", "stats", "path=a.safetensors", "shares=0.125", "scope=shared"]) == 0
    own = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(own["hit_rate"]["lru"]) == ["0.125"]
    assert own["hit_rate"]["lru"]["0.125"] != found[1000]["hit_rate"]["lru"]["0.125"]


def test_gaps_of_a_recording_are_shown(capsys):
    Path("a.csv").write_text("token,layer,experts\n3,0,1\n4,0,2\n")
    words = ["path=a.csv", "out=t.safetensors", "format=csv", "experts=4", "model=toy", "native_top_k=2", "layers=2"]
    assert main(["trace", "import", *words]) == 0
    shown = capsys.readouterr().out.splitlines()
    gaps = json.loads(shown[-1])["gaps"]
    assert len(gaps) == 3
    assert main(["trace", "stats", "path=t.safetensors"]) == 0
    again = capsys.readouterr().out.splitlines()
    for lines in (shown, again):
        assert [line for line in lines if line.startswith("gap: ")] == [f"gap: {gap}" for gap in gaps]


@dataclass(frozen=True)
class Words:
    """Every type of option."""

    count: int = field(metadata={"help": "how many"})
    share: float = 0.5
    name: str = "x"
    quick: bool = False
    cap: int | None = None
    kind: Literal["a", "b"] = "a"
    parts: tuple[str, ...] = ()


@given(st.integers(), st.floats(allow_nan=False), st.text().filter(str.strip), st.booleans(), st.none() | st.integers())
def test_what_is_written_as_words_is_read_back(count, share, name, quick, cap):
    words = [
        f"count={count}",
        f"share={share!r}",
        f"name={name}",
        f"quick={quick}",
        f"cap={cap}",
        "kind=b",
        "parts=p,q",
    ]
    assert parse(words, Words, "test") == Words(count, share, name, quick, cap, "b", ("p", "q"))


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("count=x", "a whole number"),
        ("share=much", "a number"),
        ("quick=perhaps", "true, false"),
        ("cap=x", "a whole number"),
        ("kind=c", "a, b"),
        ("kound=a", "did you mean"),
        ("loose", "count"),
    ],
)
def test_a_bad_word_says_what_would_do(word, hint):
    with pytest.raises(UsageError, match=hint):
        parse(["count=1", word] if not word.startswith("count") else [word], Words, "test")


def test_missing_and_doubled_words_are_refused():
    with pytest.raises(UsageError, match="needs count="):
        parse([], Words, "test")
    with pytest.raises(UsageError, match="twice"):
        parse(["count=1", "count=2"], Words, "test")


def test_help_shows_types_defaults_and_texts():
    text = describe(Words, "test")
    for part in ("count=a whole number", "how many", "[required]", "kind=a|b", "[false]", "cap=a whole number|none"):
        assert part in text


@given(st.floats(1e-6, 1.0), st.integers(1, 10**12))
def test_a_fraction_never_exceeds_the_routed_bytes(fraction, routed):
    assert 0 <= parse_budget(str(fraction), routed) <= routed


def test_budgets_are_fractions_or_sizes():
    assert parse_budget("0.25", 1000) == 250
    assert parse_budget("1", 1000) == 1000
    assert parse_budget("3GiB", 1000) == parse_budget("3.0 gib", 1) == 3 * GIB
    assert parse_bytes("1.5GB") == 1_500_000_000
    for wrong in ("0", "-0.1", "1.5", "3", "GiB", "3 parsecs", "", "nan", "0GiB"):
        with pytest.raises(UsageError):
            parse_budget(wrong, 1000)
