"""What the suite says at its end, which no test decides by: what hooks cost, and advice."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module, metadata, resources

from moebench.testing.lab import Lab
from moebench.testing.subject import Subject


def overhead(lab: Lab | None, subject: Subject) -> Iterator[str]:
    """Calls of a system's hooks and what they take, per token of one sequence on the live model, from the first run."""
    run = None if lab is None else next((run for (whose, _), run in lab.kept.items() if whose is subject), None)
    if run is None:
        return
    seconds, calls = run.session.hooks.spent
    tokens = sum(record.step.emits for record in run.audit.records)
    yield f"{subject.name}: {calls / tokens:.0f} hook calls and {seconds / tokens * 1e6:.0f} us per token"


def advice(subject: Subject) -> Iterator[str]:
    """What a reader of the table will miss."""
    spec = subject.spec
    if not spec.summary:
        yield f"{subject.name}: no summary, which 'moebench list' shows"
    if spec.needs and not spec.paper:
        yield f"{subject.name}: no paper or other source named"
    package = import_module(spec.make.__module__).__package__
    own = bool(spec.paper) or subject.origin != "moebench"  # a classic cache needs no page
    if own and package and not _has_page(package):
        yield f"{subject.name}: no README in {package}"


def _has_page(package: str) -> bool:
    """Whether there is a README in the package, or in the distribution that it was installed from."""
    if any(file.name.lower().startswith("readme") for file in resources.files(package).iterdir()):
        return True
    sources = metadata.packages_distributions().get(package.partition(".")[0], ()) if package != "moebench" else ()
    return any("Description" in metadata.metadata(source) for source in sources)
