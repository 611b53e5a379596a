"""Whether the hub can be reached, found out by one request before a download.

huggingface_hub repeats the first request for a file five times, with a warning for each: without a
network a command would end after half a minute only.
"""

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from memguard.hf.checkpoint_files import CONFIG


def check_reachable(path: str, revision: str | None) -> None:
    """Request the configuration of a hub id once; one in the local cache is not requested.

    What the hub answers is left to the download, which explains it.

    Args:
        path: hub id; a local path is not requested.
        revision: of a hub id.

    Raises:
        ConnectionError: the hub does not answer.
    """
    if Path(path).exists():
        return
    try:
        cached = huggingface_hub.try_to_load_from_cache(path, CONFIG, revision=revision)
        if not isinstance(cached, str):
            url = huggingface_hub.hf_hub_url(path, CONFIG, revision=revision)
            huggingface_hub.get_hf_file_metadata(url)
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled):
        return
    except Exception as error:  # Of the HTTP client, which differs between versions of the library.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConnectionError(
            f"it does not answer ({reason}). Check the connection, or download the model elsewhere "
            "and give its folder"
        ) from error
