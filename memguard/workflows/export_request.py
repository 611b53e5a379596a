"""The arguments of `memguard export`, checked before torch is imported."""

from dataclasses import dataclass
from pathlib import Path

from memguard.errors import ConfigError
from memguard.hf.adapter_files import check_model, is_adapter
from memguard.workflows.run_folder import check_finished

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRequest:
    """The arguments of `memguard export`."""

    folder: Path
    """Folder of a run that trained an adapter, or of an adapter."""
    out: Path
    merge: bool
    dtype: str | None
    """Of the written weights; None keeps the base's."""
    base: str | None = None
    """Folder or hub id of the base model; None locates the one that the adapter names."""

    @property
    def is_run(self) -> bool:
        """Whether the folder is that of a run."""
        return (self.folder / "config.yaml").is_file()

    @property
    def adapter(self) -> Path:
        """Folder of the adapter."""
        return self.folder / "adapter" if self.is_run else self.folder

    def check(self) -> None:
        """Reject arguments that cannot be used.

        Raises:
            ConfigError: an option is missing or invalid; there is no adapter; OUT exists.
            ModelError: the run is unfinished; the adapter or its base cannot be read.
            RecordError: the run is damaged.
        """
        if not self.merge:
            raise ConfigError("give --merge: export writes an adapter merged into its base")
        if self.dtype not in (None, *DTYPES):
            raise ConfigError(f"'--dtype' must be {', '.join(DTYPES)}; got '{self.dtype}'")
        if not self.folder.is_dir():
            raise ConfigError(f"there is no folder '{self.folder}'; correct the path")
        if self.is_run:
            check_finished(self.folder, without_documents=True)
        if not is_adapter(self.adapter):
            why = (
                "model/ of this run is complete: it trained no adapter"
                if self.is_run
                else "it has no adapter_config.json, or weights of its own"
            )
            raise ConfigError(f"'{self.folder}' has no adapter to merge ({why})")
        if self.out.exists():
            raise ConfigError(f"'{self.out}' exists already; choose another name or delete it")
        if self.adapter.resolve() in self.out.resolve().parents:
            raise ConfigError(f"'{self.out}' must not be inside the adapter's folder")
        check_model(str(self.adapter), base=self.base)
