"""The whole configuration of a run: frozen dataclasses, each defined next to what it configures."""

from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Suppress

from course_lib.parallel.ddp import DDPOptions
from course_lib.parallel.ddp import check as check_ddp
from course_lib.train import data, folder, measure, model, optim, precision
from course_lib.train.data import DataConfig
from course_lib.train.errors import ConfigError
from course_lib.train.folder import RunConfig
from course_lib.train.measure import MeasureConfig
from course_lib.train.model import ModelConfig
from course_lib.train.optim import OptimConfig
from course_lib.train.precision import AmpConfig


@dataclass(frozen=True)
class Config:
    """What a recipe returns and the options change."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    amp: AmpConfig = field(default_factory=AmpConfig)
    ddp: DDPOptions = field(default_factory=DDPOptions)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    recipe: Annotated[str, Suppress] = ""  # the name it was found under; not an option


def check(config: Config, world_size: int) -> None:
    """Raise ConfigError for the first value that cannot work.

    All that can be known before anything is opened.
    """
    folder.check(config.run)
    data.check(config.data, world_size)
    model.check(config.model)
    optim.check(config.optim)
    precision.check(config.amp, config.model.dtype)
    measure.check(config.measure)
    try:
        check_ddp(config.ddp, data.settled(config.data, world_size).accumulate)
    except ValueError as error:  # a sentence that begins with the name of the option
        raise ConfigError(f"--ddp.{error}") from error


def as_json(config: Config) -> dict[str, Any]:
    """The configuration as config.json holds it."""
    return {
        part: {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
        for part, options in asdict(config).items()
        if isinstance(options, dict)
    }


def option_names() -> list[str]:
    """Every option of the command line, for example "optim.lr"."""
    return [
        f"{part.name}.{option.name}"
        for part in fields(Config)
        if is_dataclass(part.default_factory)
        for option in fields(part.default_factory)
    ]
