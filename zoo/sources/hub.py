"""Models from the Hugging Face hub, in the hub's own cache, which other tools share.

Small files and those on Xet storage go through `huggingface_hub`. It starts a plain download anew after every
interruption, so large files that come over plain HTTP are fetched here, resumed where the last try stopped, put into
the cache under their hash, and then linked by `huggingface_hub` itself.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import ZooError
from zoo.card import HubSource
from zoo.checkpoint import (
    INDEX,
    SIDE_FILES,
    SINGLE,
    check_config,
    choose_weights,
    indexed_files,
    read_config,
    read_json,
)
from zoo.hashing import sha256_file
from zoo.progress import Progress, Silent, forwarding_tqdm
from zoo.sources.offline import offline_variable
from zoo.store import require_disk

_PROBE_TIMEOUT = 5  # seconds: an unreachable hub must not hold up the next source
_READ_TIMEOUT = 30  # seconds without a byte
_MAX_TRIES = 5  # in a row without a new byte
_RESUME_FROM = 1 << 20  # bytes; a smaller file is fetched again whole
_CHUNK = 1 << 20


@dataclass(frozen=True)
class HubSnapshot:
    """A model's files at one commit: `folder` holds links into the hub's cache."""

    folder: Path
    commit: str
    license: str | None


def pull_hub(source: HubSource, *, trust_remote_code: bool, progress: Progress) -> HubSnapshot:
    """Fetch config, tokenizer and safetensors of `source`, or find them in the cache when offline.

    Raises `ZooError` where the hub cannot be reached, refuses, or holds nothing that may be used.
    """
    if variable := offline_variable():
        return _cached(source, variable)
    return _Pull(source, progress).run(trust_remote_code)


def fetch_config(source: HubSource) -> Path:
    """config.json of `source` alone, fetched into the hub's cache (or found there when offline).

    Raises `ZooError` where the hub cannot be reached, refuses, or the repository has none.
    """
    if variable := offline_variable():
        return _cached(source, variable).folder / "config.json"
    pull = _Pull(source, Silent())
    try:
        return pull.fetch("config.json", source.revision)
    except Exception as error:
        raise pull.explain(error) from None


def hub_cache() -> Path:
    """The hub's cache folder, from the environment as it is now."""
    from huggingface_hub import constants

    if explicit := os.environ.get("HF_HUB_CACHE"):
        return Path(explicit).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(constants.HF_HUB_CACHE)


def remove_hub(source: HubSource, commit: str) -> int:
    """Delete one commit of `source` from the hub's cache. Returns the bytes freed."""
    from huggingface_hub import scan_cache_dir

    if not hub_cache().is_dir():
        return 0
    revisions = {r.commit_hash for repo in scan_cache_dir(hub_cache()).repos for r in repo.revisions}
    if commit not in revisions:
        return 0
    strategy = scan_cache_dir(hub_cache()).delete_revisions(commit)
    strategy.execute()
    return strategy.expected_freed_size


def _cached(source: HubSource, variable: str) -> HubSnapshot:
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(source.repo, "config.json", cache_dir=hub_cache(), revision=source.revision)
    if not isinstance(path, str):
        raise ZooError(f"{variable} is set, and {source.repo} at {source.revision} is not in {hub_cache()}")
    return HubSnapshot(Path(path).parent, Path(path).parent.name, None)


class _Pull:
    def __init__(self, source: HubSource, progress: Progress):
        self.source = source
        self.progress = progress
        self.endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
        self.commit = ""
        self.sizes: dict[str, int] = {}
        self.hashes: dict[str, str] = {}

    def run(self, trust_remote_code: bool) -> HubSnapshot:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # what it would warn of comes back as an error, told once
        try:
            info = HfApi(endpoint=self.endpoint).model_info(
                self.source.repo, revision=self.source.revision, timeout=_PROBE_TIMEOUT, files_metadata=True
            )
            self.commit = str(info.sha)
            for sibling in info.siblings or []:
                self.sizes[sibling.rfilename] = sibling.size or 0
                if sibling.lfs:
                    self.hashes[sibling.rfilename] = sibling.lfs.sha256
            weights, sides = self.choose(trust_remote_code)
            require_disk(self.cache_root(), sum(self.missing_bytes(name) for name in weights), self.source.label)
            # Asked for by the revision's own name, so that the cache knows that name when offline.
            folder = self.fetch("config.json", self.source.revision).parent
            if folder.name != self.commit:
                raise ZooError(f"{self.source.repo} changed at this moment; try again")
            for name in (*sides, *weights):
                path = self.fetch(name)
                # A damaged file that lay in the cache is fetched once more.
                if name in self.hashes and not self.intact(name, path) and not self.intact(name, self.fetch(name)):
                    raise ZooError(f"{name} does not have the SHA-256 that {self.source.repo} promises; not used")
        except ZooError:
            raise
        except Exception as error:
            raise self.explain(error) from None
        return HubSnapshot(folder, self.commit, _license(info))

    def choose(self, trust_remote_code: bool) -> tuple[list[str], list[str]]:
        """Weight files and side files to fetch, decided before any weight is."""
        names = [name for name in self.sizes if "/" not in name]
        if "config.json" not in names:
            raise ZooError(f"{self.source.repo} has no config.json, so it is no model in Hugging Face form")
        config = read_config(self.fetch("config.json"))
        check_config(config, self.source.label, trust_remote_code=trust_remote_code)
        if INDEX in names:
            weights = indexed_files(read_json(self.fetch(INDEX)), f"{self.source.label}/{INDEX}")
            if missing := sorted(set(weights) - set(names)):
                raise ZooError(f"{self.source.repo} lacks {len(missing)} of its weight files, first {missing[0]}")
        else:
            weights = [SINGLE] if SINGLE in names else choose_weights(names, self.source.label)
        if "tokenizer.json" not in names:
            raise ZooError(
                f"{self.source.repo} has no tokenizer.json; save the model with its fast tokenizer to a folder"
            )
        sides = [name for name in SIDE_FILES if name in names]
        if config.get("auto_map"):
            sides += [name for name in names if name.endswith(".py")]
        return weights, sides

    def cache_root(self) -> Path:
        root = hub_cache()
        root.mkdir(parents=True, exist_ok=True)
        return root

    def blob(self, etag: str) -> Path:
        return hub_cache() / f"models--{self.source.repo.replace('/', '--')}" / "blobs" / etag

    def missing_bytes(self, name: str) -> int:
        blob = self.hashes.get(name)
        return 0 if blob and self.blob(blob).exists() else self.sizes[name]

    def fetch(self, name: str, revision: str | None = None) -> Path:
        """Bring one file into the cache and return its link in the snapshot of the commit."""
        from huggingface_hub import hf_hub_download

        etag = self.hashes.get(name)
        if etag and self.sizes[name] >= _RESUME_FROM and not self.blob(etag).exists():
            self.fetch_resumably(name, etag)
        return Path(
            hf_hub_download(
                self.source.repo,
                name,
                revision=revision or self.commit,
                cache_dir=hub_cache(),
                endpoint=self.endpoint,
                tqdm_class=forwarding_tqdm(self.progress, f"fetching {name}"),
            )
        )

    def fetch_resumably(self, name: str, etag: str) -> None:
        """Fetch a large file over plain HTTP into the cache, going on where an earlier try stopped."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        url = hf_hub_url(self.source.repo, name, revision=self.commit, endpoint=self.endpoint)
        metadata = get_hf_file_metadata(url, timeout=_PROBE_TIMEOUT, endpoint=self.endpoint)
        if getattr(metadata, "xet_file_data", None) is not None or metadata.etag != etag:
            return  # Xet resumes by its own cache of chunks
        blob = self.blob(etag)
        blob.parent.mkdir(parents=True, exist_ok=True)
        partial = blob.with_name(f"{etag}.plancast-part")
        if partial.exists() and partial.stat().st_size > self.sizes[name]:
            partial.unlink()
        tries = 0
        while (have := partial.stat().st_size if partial.exists() else 0) < self.sizes[name]:
            try:
                self.stream(url, name, partial, have)
            except Exception as error:
                got = partial.stat().st_size if partial.exists() else 0
                tries = 0 if got > have else tries + 1
                if not _is_transport_error(error) or tries >= _MAX_TRIES:
                    raise
                self.progress.note(f"{name}: the connection broke at byte {got} of {self.sizes[name]}; resuming")
                time.sleep(min(0.2 * 2**tries, 4))
        digest = sha256_file(partial, self.progress)
        if digest != etag or partial.stat().st_size != self.sizes[name]:
            partial.unlink()
            raise ZooError(f"{self.source.repo}: {name} arrived with SHA-256 {digest}, {etag} was promised; try again")
        partial.replace(blob)

    def stream(self, url: str, name: str, partial: Path, have: int) -> None:
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        session: Any = get_session()
        with session.stream("GET", url, headers=headers, timeout=_READ_TIMEOUT, follow_redirects=True) as response:
            if response.status_code == 416:  # what lies here does not fit the file there
                partial.unlink()
                return
            hf_raise_for_status(response)
            with partial.open("ab") as file:
                if have and response.status_code == 200:  # the range was ignored: the whole file comes
                    file.truncate(0)
                    have = 0
                for chunk in response.iter_bytes(_CHUNK):
                    file.write(chunk)
                    have += len(chunk)
                    self.progress.update(f"fetching {name}", have, self.sizes[name])

    def intact(self, name: str, path: Path) -> bool:
        """Whether the file has the promised hash. One that has not is removed from the cache."""
        if sha256_file(path, self.progress) == self.hashes[name]:
            return True
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        return False

    def explain(self, error: Exception) -> ZooError:
        """The hub's errors in one line, with what to do."""
        from huggingface_hub import errors

        repo, where = self.source.repo, self.endpoint or "the hub"
        if isinstance(error, errors.GatedRepoError):
            return ZooError(
                f"{repo} is gated: accept its licence on its page on the hub, then set HF_TOKEN to a token of yours"
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            return ZooError(f"{where} has no model {repo} (a private one needs HF_TOKEN)")
        if isinstance(error, errors.RevisionNotFoundError):
            return ZooError(f"{repo} has no revision {self.source.revision!r}")
        if isinstance(error, errors.HFValidationError):
            return ZooError(f"{repo!r} is no name of a model on the hub; owner/name is expected")
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status:
            return ZooError(f"{where} answered {status} for {repo}")
        text = " ".join(str(error).split())[:160] or type(error).__name__
        return ZooError(f"{where} cannot be reached ({text})")


def _is_transport_error(error: Exception) -> bool:
    # httpx before huggingface_hub 2, httpx2 since: the name of the base class is the same.
    return any(base.__name__ == "TransportError" for base in type(error).__mro__)


def _license(info: Any) -> str | None:
    tags = [tag.removeprefix("license:") for tag in info.tags or [] if tag.startswith("license:")]
    return tags[0] if tags else None
