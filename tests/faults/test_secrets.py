"""No secret is shown, whatever fails: pushes with a key and a password along every error path."""

from __future__ import annotations

import base64
import json
import logging
import traceback

import pytest

from fault_plot import weights
from fault_proxy import Fault
from fault_table import PHASES
from streamer import Session, StreamerError, Timeouts, Trace

pytestmark = pytest.mark.timeout(60)

KEY, USER, PASSWORD = "s3cret-key-of-mine", "some-user", "p4ssw0rd-of-mine"
SECRETS = (KEY, PASSWORD, base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode())
PATHS = sorted({phase.path for phase in PHASES})
TIMEOUTS = Timeouts(connect=20, progress=20)


def push(proxy, source, shown, trace):
    """Push once, and put into ``shown`` all that a user may get to see of it."""
    url = proxy.url.replace("http://", f"http://{USER}:{PASSWORD}@")
    options = {"headers": {"X-Api-Key": KEY}, "timeouts": TIMEOUTS, "trace": trace}
    with Session(url, **options, on_event=lambda event: shown.append(repr(event))) as session:
        try:
            report = session.push(source)
            shown += [repr(report), json.dumps(report.as_json())]
        except StreamerError as error:
            shown += traceback.format_exception(error)
            shown += [repr(error), repr(error.held), repr(error.args), repr(error.__dict__)]
        shown += [repr(session), repr(session.servers), repr(session._options), repr(vars(session))]


@pytest.mark.parametrize("how", ["echo", "moved", "garbage", "closed", ""])
def test_no_secret_is_shown(proxy, server, make_source, caplog, capfd, tmp_path, how):
    """``echo`` and ``moved``: the server repeats what it was told, in its answer or a redirect."""
    caplog.set_level(logging.DEBUG)
    shown: list[str] = []
    failed = 0
    trace = Trace()
    for path in PATHS if how else PATHS[:1]:
        server.post("/resume")  # what the last one has left paused
        before = len(shown)
        proxy.inject(Fault(path, how=how, asked="first" if how == "garbage" else "never"))
        if not how:
            proxy.heal()
        push(proxy, make_source(weights(1)), shown, trace)
        proxy.heal()
        failed += any("Traceback" in text for text in shown[before:])
    trace.write(tmp_path / "trace.json")
    assert failed == (len(PATHS) if how else 0)
    out = capfd.readouterr()
    seen = [*shown, caplog.text, out.out, out.err, (tmp_path / "trace.json").read_text()]
    seen.append(server.log.read_text())
    for text in seen:
        assert not [secret for secret in SECRETS if secret in text]
    assert any(proxy.url.removeprefix("http://") in text for text in seen)
