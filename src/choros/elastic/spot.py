"""Notices that a cloud takes a spot machine away, from 30 seconds to two minutes before: this rank then gets SIGTERM,
and leaves after its step.

A machine's cloud answers at an address that it alone has. Each rank asks it; where none answers the first time, not
again. Azure takes up to two minutes for that, in which it begins to look for events of the machine. Sources:
the clouds' documents on spot instance interruptions (AWS, IMDSv2), preemptible instances (Google) and scheduled events
(Azure).
"""

import json
import logging
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from urllib.error import HTTPError

from choros import durations

_log = logging.getLogger("choros")
_AZURE = {"Metadata": "true"}
_LINK_LOCAL = "http://169.254.169.254"
#: By cloud, where it answers.
ADDRESSES = {"aws": _LINK_LOCAL, "azure": _LINK_LOCAL, "gcp": "http://metadata.google.internal"}

_watches = threading.Lock()


def watch_spot(cloud: str, is_asked: Callable[[], bool]) -> None:
    """Asks ``cloud`` from now on, in a thread, and only once in a process; ``is_asked``: it need not end this rank."""
    if _watches.acquire(blocking=False):
        threading.Thread(target=_watch, args=(cloud, is_asked), name="choros: spot", daemon=True).start()


def _watch(cloud: str, is_asked: Callable[[], bool]) -> None:
    taken, address, seconds = _TAKEN[cloud], ADDRESSES[cloud], durations.SPOT_FIRST
    while True:
        try:
            if taken(address, seconds):
                break
            seconds = durations.SPOT_ANSWER
        except (OSError, HTTPException, ValueError) as error:  # ValueError: what it answers is no JSON
            if seconds == durations.SPOT_FIRST:
                _log.warning("CHOROS_SPOT_NOTICES=%s: no notices: %s does not answer: %s.", cloud, address, error)
                return
        time.sleep(durations.SPOT_LOOK)
    if not is_asked():  # else this would be a second signal, which ends a rank at once
        _log.warning("the cloud takes this machine away: SIGTERM.")
        os.kill(os.getpid(), signal.SIGTERM)


def _of_aws(address: str, seconds: float) -> bool:
    token = _ask(f"{address}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, seconds, method="PUT")
    try:
        _ask(f"{address}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token}, seconds)
    except HTTPError as error:
        if error.code == 404:  # there is none
            return False
        raise
    return True


def _of_azure(address: str, seconds: float) -> bool:
    """All machines of a scale set get the events of each."""
    name = _ask(f"{address}/metadata/instance/compute/name?api-version=2021-02-01&format=text", _AZURE, seconds)
    events = json.loads(_ask(f"{address}/metadata/scheduledevents?api-version=2020-07-01", _AZURE, seconds))
    return any(
        event.get("EventType") == "Preempt" and name in event.get("Resources", []) for event in events.get("Events", [])
    )


def _of_google(address: str, seconds: float) -> bool:
    return _ask(f"{address}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}, seconds) == "TRUE"


def _ask(url: str, headers: Mapping[str, str], seconds: float, method: str = "GET") -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy has this address
    request = urllib.request.Request(url, headers=dict(headers), method=method)  # noqa: S310  (one of ADDRESSES)
    with opener.open(request, timeout=seconds) as answer:
        text: str = answer.read().decode()
    return text.strip()


#: By cloud, whether it takes this machine away.
_TAKEN: Mapping[str, Callable[[str, float], bool]] = {"aws": _of_aws, "azure": _of_azure, "gcp": _of_google}
