"""What was asked: the settings of a run, checked before anything is read.

    settings.py      what all settings have in common
    schema.py        the settings of a run: one sentence, a unit and a default each
    data.py          those of its documents
    budget.py        the risk budget
    mitigations.py   those of each mitigation, and which do not go together
    schema_sweep.py  the settings of a sweep
    loading.py       YAML + dotted overrides -> RunConfig; all problems together, with line, column
    messages.py      what pydantic found wrong, as sentences a user can act on
    template.py      RunConfig -> commented YAML (`memguard init`)

A wrong setting is told in under two seconds: nothing here imports torch.
"""

from memguard.config.budget import BudgetConfig
from memguard.config.data import CanaryConfig, DataConfig, StudyConfig
from memguard.config.loading import (
    Document,
    apply_overrides,
    apply_settings,
    load_run_config,
    load_yaml,
    parse_key,
    validate,
)
from memguard.config.mitigations import GoldfishConfig, MitigationConfig, TokenDropoutConfig
from memguard.config.schema import (
    AuditConfig,
    AxisName,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    ScratchConfig,
    TrainConfig,
)
from memguard.config.schema_sweep import SweepConfig, SweepSetting
from memguard.config.template import dump_yaml, render_template

__all__ = [
    "AuditConfig",
    "AxisName",
    "BudgetConfig",
    "CanaryConfig",
    "DataConfig",
    "Document",
    "GoldfishConfig",
    "MitigationConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "RunConfig",
    "ScratchConfig",
    "StudyConfig",
    "SweepConfig",
    "SweepSetting",
    "TokenDropoutConfig",
    "TrainConfig",
    "apply_overrides",
    "apply_settings",
    "dump_yaml",
    "load_run_config",
    "load_yaml",
    "parse_key",
    "render_template",
    "validate",
]
