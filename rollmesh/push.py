"""Uploads of model folders to the Hugging Face Hub, or to a server with its interface (`HF_ENDPOINT`)."""

from __future__ import annotations

from pathlib import Path

from rollmesh.mesh.errors import ConfigError, DataError, RollmeshError, UnreachableError

_REFUSALS = (401, 403)


def push_folder(folder: Path, repository: str, *, private: bool = True, message: str = "Upload a model") -> str:
    """Uploads a folder to a model repository, as one commit.

    The token is that of `hf auth login`, or `HF_TOKEN`.

    Args:
        folder: a Hugging Face model folder, such as `rollmesh.export` writes.
        repository: `NAMESPACE/NAME`; it is made where it does not exist.
        private: of a repository that is made; one that exists stays as it is.
        message: of the commit.

    Returns:
        The URL of the commit.

    Raises:
        ConfigError: the hub refuses the token or the name.
        DataError: no such folder.
        UnreachableError: the hub does not answer, or is switched off (`HF_HUB_OFFLINE`).
    """
    if not (folder / "config.json").is_file():
        raise DataError(f"{folder} is no model folder: it has no config.json", hint="`rollmesh export` writes one")
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        hub.create_repo(repository, private=private, exist_ok=True)
        commit = hub.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    except Exception as error:  # the client's errors have no common base with those of its HTTP library
        raise _typed(error, repository, str(hub.endpoint)) from error
    return str(commit.commit_url)


def _typed(error: Exception, repository: str, endpoint: str) -> RollmeshError:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    said = " ".join(str(error).split())
    if isinstance(error, HFValidationError):
        return ConfigError(f"{repository!r} is no name of a repository: {said}", hint="write NAMESPACE/NAME")
    if status in _REFUSALS:
        return ConfigError(
            f"{endpoint} refuses to write to {repository}: {said}",
            hint="`hf auth login` or HF_TOKEN, with a token that may write there",
        )
    return UnreachableError(
        f"{repository} could not be pushed to {endpoint}: {type(error).__name__}: {said}",
        hint="the exported folder is whole: try again, or see HF_HUB_OFFLINE and HF_ENDPOINT",
    )
