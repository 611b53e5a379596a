"""The settings of a run, checked before anything is read.

    settings.py      base class and types of all settings; how the next token is drawn
    schema.py        the settings of a run and of a sweep: one sentence, a unit, a default each
    data.py          the settings of its documents
    formats.py       the settings of their format: columns, template, tags
    adapters.py      the settings of its adapters
    training.py      the settings of the optimizer, of its steps and of the risk budget
    optimizers.py    what each optimizer keeps of a parameter, needs and excludes
    mitigations.py   the settings of each mitigation, and which of them conflict
    utility.py       the settings of benchmark tasks, also by name: hellaswag:200
    yaml_text.py     YAML within bounds -> plain values, each with its line and column
    loading.py       these + dotted overrides -> RunConfig; all problems at once, with their places
    foreign_names.py names of settings in other libraries -> ours, or what to use instead
    template.py      RunConfig -> commented YAML (`memguard init`)

A wrong setting is refused in under two seconds: nothing here imports torch.
"""

from memguard.config.data import CanaryConfig, DataConfig, StudyConfig
from memguard.config.formats import ColumnsConfig, FormatConfig, TagsConfig
from memguard.config.loading import (
    apply_overrides,
    apply_settings,
    load_run_config,
    parse_key,
    validate,
)
from memguard.config.mitigations import GoldfishConfig, MitigationConfig, TokenDropoutConfig
from memguard.config.schema import AuditConfig, AxisName, ParallelConfig, RunConfig, SweepConfig
from memguard.config.template import dump_yaml, render_template
from memguard.config.training import BudgetConfig, OptimConfig, ProfileConfig, TrainConfig
from memguard.config.yaml_text import Document, load_yaml
