"""The conformance suite: what every system must keep, run with ``pytest --pyargs moebench.testing --system=ID``.

``plugin`` is the pytest plugin with its options, ``subject`` the system under test, ``lab`` runs it live, ``replays``
on traces, ``audit`` watches both. See ``docs/conformance.md``. Nothing here decides by time.
"""
