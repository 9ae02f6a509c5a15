"""What is asked of which Hub and with which token, and the errors that say so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from streamer_safetensors.untrusted import shown

from streamer.exceptions import SourceError
from streamer_huggingface.path import HubPath
from streamer_huggingface.worker import Failure

_LOGIN = "set HF_TOKEN, or run: hf auth login"


class Token:
    """A secret that no repr and no format shows."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def __repr__(self) -> str:
        return "[token]"

    def reveal(self) -> str:
        """The token itself, to be sent."""
        return self._value


@dataclass(frozen=True)
class Target:
    """A path, the Hub that has it, and the token that it is asked with, None for none."""

    path: HubPath
    endpoint: str
    token: Token | None
    user_agent: str = "streamer"

    def __str__(self) -> str:
        return str(self.path)

    @property
    def token_or_false(self) -> str | bool:
        """The token as ``huggingface_hub`` takes it; False is none, not even a stored one."""
        return self.token.reveal() if self.token else False

    @property
    def page(self) -> str:
        """The model's page, without a password that the endpoint may have in it."""
        parts = urlsplit(self.endpoint)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}/{self.path.repo}"

    def error(self, problem: str, remedy: str) -> SourceError:
        """An error that names the model, its revision, and whether a token was sent."""
        token = "a token was sent" if self.token else "no token was sent"
        return SourceError(self.masked(f"{self}: {problem} ({token}); {remedy}"))

    def masked(self, text: str) -> str:
        """``text`` without the token, should anything have put it there."""
        return text.replace(self.token.reveal(), "[token]") if self.token else text

    @contextmanager
    def named(self) -> Iterator[None]:
        """Say of which model a `SourceError` is that was raised about one of its files."""
        try:
            yield
        except SourceError as error:
            if str(error).startswith(f"{self}: "):
                raise
            raise SourceError(f"{self}: {error}") from error

    def failed(self, failure: Failure, file: str = "") -> SourceError:
        """The error for a request that failed, about ``file`` if there is one."""
        what = f"{shown(file)}: " if file else ""
        if failure.offline:
            return self.error(
                f"{what}HF_HUB_OFFLINE is set, and this is not in the cache",
                "unset it, or download the model first: hf download",
            )
        if failure.status is None and not failure.network:
            return self.error(
                f"{what}{shown(failure.reason)}", "check HF_ENDPOINT, and the folder of the cache"
            )
        if failure.status is None:
            return self.error(
                f"{what}no answer from {urlsplit(self.endpoint).hostname} or its storage: "
                f"{shown(failure.reason)}",
                "check the network (HF_ENDPOINT, HTTPS_PROXY), or set HF_HUB_OFFLINE=1 to take "
                "what is in the cache",
            )
        return self._refused(failure, what, file)

    def _refused(self, failure: Failure, what: str, file: str) -> SourceError:
        status, code = failure.status, failure.code
        revision = shown(self.path.revision)
        if code == "GatedRepo":
            if self.token:
                return self.error(
                    f"{what}the model is gated, and the account of this token has no access",
                    f"ask for it at {self.page}",
                )
            return self.error(
                f"{what}the model is gated", f"ask for access at {self.page}, then {_LOGIN}"
            )
        if code == "RevisionNotFound":
            before = "; a folder goes before the @" if "/" in revision else ""
            return self.error(
                f"the model has no branch, tag or commit {revision}",
                f"its page lists them: {self.page}{before}",
            )
        if code == "EntryNotFound":
            return self.error(f"there is no file {shown(file)}", f"see {self.page}")
        if status == 429:
            asked = f", which asks to wait for {shown(failure.retry_after)} s"
            return self.error(
                f"{what}too many requests for the Hub (429){asked if failure.retry_after else ''}",
                "wait, then try again" if self.token else f"wait, or {_LOGIN}",
            )
        said = f" ({status}: {shown(failure.text)})" if failure.text else f" ({status})"
        if code == "RepoNotFound" or status in (401, 404):
            return self._not_found(what, said, invalid=status == 401 and bool(self.token))
        if status == 403:
            return self.error(
                f"{what}the Hub does not allow it{said}",
                "use a token that may read this model" if self.token else _LOGIN,
            )
        return self.error(f"{what}the Hub failed{said}", "try again later")

    def _not_found(self, what: str, said: str, *, invalid: bool) -> SourceError:
        """The Hub does not tell a missing model from one that it hides."""
        old = "" if "/" in self.path.repo else "; a model is called org/name"
        if invalid:
            return self.error(
                f"{what}the Hub does not take this token, or there is no such model{said}",
                f"check the name{old}, and renew the token",
            )
        return self.error(
            f"{what}there is no such model, or it is private{said}",
            f"check the name{old}"
            + (
                ", and that this token may read it"
                if self.token
                else f"; for a private one {_LOGIN}"
            ),
        )
