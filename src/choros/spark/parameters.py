"""What estimators, and the models they return, have in common: parameters with Horovod's names, as one table for each;
``fit`` on rows that are written as Parquet; ``transform``, in pandas UDFs.
"""

from __future__ import annotations

import uuid
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.ml import Estimator, Model
from pyspark.ml.param import Param, Params

from choros.errors import ConfigError
from choros.spark.plan import VISIBLE
from choros.spark.rows import ParquetRows, Store, write_parquet
from choros.spark.run import SparkBackend

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: The parameters of all estimators: their defaults, and what they are.
COMMON: Mapping[str, tuple[Any, str]] = {
    "num_proc": (None, "number of ranks; default: spark.default.parallelism"),
    "backend": (None, "a SparkBackend, in place of num_proc"),
    "store": (None, "a Store, or a directory that the driver and all executors share"),
    "model": (None, "the model, built on the driver"),
    "optimizer": (None, "the optimizer; its learning rate is multiplied by the number of ranks, as in Horovod"),
    "loss": (None, "the loss, or one for each label"),
    "loss_weights": (None, "the weights of the labels' losses"),
    "metrics": ([], "the metrics"),
    "feature_cols": (None, "the columns of the model's inputs"),
    "label_cols": (None, "the columns of its labels"),
    "sample_weight_col": (None, "the column of the rows' weights"),
    "validation": (None, "a fraction of the rows, or a column that is true for rows to validate with"),
    "batch_size": (32, "rows of a batch on each rank"),
    "val_batch_size": (None, "the same for validation; default: batch_size"),
    "epochs": (1, "number of epochs"),
    "train_steps_per_epoch": (None, "number of batches of an epoch; default: all rows"),
    "validation_steps_per_epoch": (None, "number of batches of a validation; default: all rows"),
    "shuffle": (True, "whether each epoch has another order of rows"),
    "random_seed": (None, "the seed of that order, of the framework, and of a validation that is a fraction"),
    "verbose": (1, "0: silent"),
    "callbacks": ([], "callbacks of the framework"),
    "use_gpu": (True, "whether the ranks may use GPUs; else they see none"),
    "backend_env": (None, "environment variables of the ranks"),
    "gradient_compression": (None, "as hvd.Compression"),
    "run_id": (None, "the name of the run; one that exists goes on from its last commit"),
}
#: Parameters of Horovod's that change nothing here.
UNUSED = (
    "partitions_per_process", "inmemory_cache_all", "train_reader_num_workers", "val_reader_num_workers",
    "reader_pool_type", "shuffle_buffer_size", "compress_sparse_cols", "label_shapes", "mp_start_method",
)  # fmt: skip


def _add_parameter(kind: Any, name: str, text: str) -> None:
    def get(self: Any) -> Any:
        return self.getOrDefault(name)

    def put(self: Any, value: Any) -> Any:
        return self._set(**{name: value})

    camel = "".join(part.title() for part in name.split("_"))
    setattr(kind, name, Param(Params._dummy(), name, text))
    setattr(kind, f"get{camel}", get)
    setattr(kind, f"set{camel}", put)


class Parameterized(Params):
    """What estimators and models have in common: the constructor takes the parameters, those of the ``tables`` of its
    class, by their names; ``getFeatureCols`` and ``setFeatureCols`` are methods.
    """

    defaults: Mapping[str, Any] = {}
    #: Those of the table that this class does not carry out.
    lacking: tuple[str, ...] = ()

    def __init_subclass__(cls, tables: Sequence[Mapping[str, tuple[Any, str]]] = ()) -> None:
        super().__init_subclass__()
        rows = {name: row for table in tables for name, row in table.items()}
        cls.defaults = {**cls.defaults, **{name: default for name, (default, _) in rows.items()}}
        for name, (_, text) in rows.items():
            _add_parameter(cls, name, text)

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self._setDefault(**self.defaults)
        self.setParams(**given)

    def setParams(self, **given: Any) -> Any:  # noqa: N802  (Spark's name)
        """Sets parameters, as in Horovod."""
        unused = sorted(given.keys() & set(UNUSED))
        if unused:
            warnings.warn(
                f"{', '.join(unused)}: no effect here; rows are read from Parquet once, and mapped into memory.",
                stacklevel=3,
            )
        unknown = sorted(given.keys() - self.defaults.keys() - set(UNUSED))
        if unknown:
            raise TypeError(f"{type(self).__name__} has no parameter {', '.join(unknown)}.")
        return self._set(**{name: value for name, value in given.items() if name not in UNUSED})

    def _set(self, **given: Any) -> Any:
        for name in self.lacking:
            if given.get(name):
                raise ConfigError(f"{type(self).__name__} cannot do what {name}={given[name]!r} says: leave it out.")
        return super()._set(**given)

    def value(self, name: str) -> Any:
        """Returns a parameter's value, or its default."""
        return self.getOrDefault(name)


@dataclass(frozen=True)
class FitPlan:
    """What an estimator needs to run its ranks, read from its parameters."""

    backend: SparkBackend
    store: Store
    run_id: str
    features: tuple[str, ...]
    labels: tuple[str, ...]
    weights: str | None
    size: int
    seed: int
    env: Mapping[str, str]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that ranks read, each once: a label may be a feature, too."""
        return tuple(dict.fromkeys((*self.features, *self.labels, *([self.weights] if self.weights else []))))

    def run(self, train: Callable[[], Any], **env: str) -> Any:
        """Returns what ``train`` returns on the first rank; a run that exists goes on from its last commit."""
        commits = self.store.commits(self.run_id)
        return self.backend.run(train, env={**self.env, **env}, commit_dir=commits)[0]


def fit_plan(estimator: Parameterized) -> FitPlan:
    """Returns the plan of an estimator; a ``ConfigError`` for parameters that are missing or contradict each other."""
    value = estimator.value
    for name in ("model", "store", "feature_cols", "label_cols"):
        if value(name) is None:
            raise ConfigError(f"{type(estimator).__name__} needs the parameter {name}.")
    if value("num_proc") is not None and value("backend") is not None:
        raise ConfigError("num_proc and backend both say how many ranks there are: give only one of them.")
    backend = value("backend") or SparkBackend(value("num_proc"), verbose=value("verbose"))
    store = value("store")
    return FitPlan(
        backend,
        Store.create(store) if isinstance(store, str) else store,
        value("run_id") or uuid.uuid4().hex[:12],
        tuple(value("feature_cols")),
        tuple(value("label_cols")),
        value("sample_weight_col"),
        backend.num_processes(),
        value("random_seed") or 0,
        {**(value("backend_env") or {}), **({} if value("use_gpu") else {VISIBLE: ""})},
    )


class RowsEstimator(Estimator, Parameterized):
    """An estimator that trains on rows that are written as Parquet."""

    def fit_on_parquet(self, rows: ParquetRows, validation: ParquetRows | None = None) -> Any:
        """Trains on rows that ``write_parquet`` has written; returns what ``fit`` does."""
        return self._train(fit_plan(self), rows, validation)

    def _fit(self, dataset: DataFrame) -> Any:
        plan = fit_plan(self)
        train, validation = _split(dataset, self.value("validation"), plan.seed)
        with ExitStack() as stack:
            rows = write_parquet(train, plan.store.get_train_data_path(plan.run_id), plan.columns)
            stack.callback(rows.delete)
            held_out = None
            if validation is not None:
                held_out = write_parquet(validation, plan.store.get_val_data_path(plan.run_id), plan.columns)
                stack.callback(held_out.delete)
            return self._train(plan, rows, held_out)

    @abstractmethod
    def _train(self, plan: FitPlan, rows: ParquetRows, held_out: ParquetRows | None) -> Any:
        """Trains, and returns the model."""


def _split(df: DataFrame, validation: Any, seed: int) -> tuple[DataFrame, DataFrame | None]:
    if not validation:
        return df, None
    if isinstance(validation, str):
        from pyspark.sql import functions

        marked = functions.coalesce(df[validation].cast("boolean"), functions.lit(False))  # null is not true
        return df.filter(~marked), df.filter(marked)
    if not 0 < validation < 1:
        raise ConfigError(f"validation={validation!r}: expected a fraction between 0 and 1, or a column's name.")
    train, held_out = df.randomSplit([1 - validation, validation], seed)
    return train, held_out


_MODEL: Mapping[str, tuple[Any, str]] = {
    "feature_cols": (None, "the columns of the model's inputs"),
    "label_cols": (None, "the columns of the labels it was trained on"),
    "output_cols": (None, "the columns that transform adds; default: each label's name with __output"),
    "batch_size": (1024, "rows that transform hands to the model at once"),
}
#: A column that only ``transform`` sees.
_PREDICTED = "__choros_predicted"
#: Predicts arrays, one for each output, from arrays, one for each feature column.
Predict = Callable[..., Sequence[Any]]


class EstimatorModel(Model, Parameterized, tables=[_MODEL]):
    """A model that an estimator returns; ``widths``: how many values each output has for a row. ``transform`` adds a
    column for each: a number, if it has one value, else a vector.
    """

    def __init__(self, model: Any, history: Any, run_id: str | None, widths: tuple[int, ...], **given: Any) -> None:
        super().__init__(**given)
        self._model, self.history, self.run_id, self.widths = model, history, run_id, widths

    def getModel(self) -> Any:  # noqa: N802  (Horovod's name)
        """Returns the trained model, on the CPU."""
        return self._model

    def getHistory(self) -> Any:  # noqa: N802  (Horovod's name)
        """Returns the history."""
        return self.history

    def predictor(self) -> Callable[[], Predict]:
        """Returns a function that Spark's workers call once, and that returns what predicts."""
        raise NotImplementedError

    def output_names(self) -> list[str]:
        """Returns the columns that ``transform`` adds."""
        names: list[str] = self.value("output_cols") or [f"{label}__output" for label in self.value("label_cols")]
        if len(names) != len(self.widths):
            raise ConfigError(f"the model has {len(self.widths)} outputs, and output_cols has {len(names)}: {names}.")
        return names

    def _transform(self, dataset: DataFrame) -> DataFrame:
        from pyspark.ml.functions import array_to_vector, vector_to_array
        from pyspark.ml.linalg import VectorUDT
        from pyspark.sql import functions

        names, features = self.output_names(), self.value("feature_cols")
        vectors = [name for name in features if isinstance(dataset.schema[name].dataType, VectorUDT)]
        inputs = [vector_to_array(dataset[name]) if name in vectors else dataset[name] for name in features]
        given = functions.struct(*[each.alias(str(index)) for index, each in enumerate(inputs)])
        predict = _prediction(self.predictor(), len(names), self.value("batch_size"))
        found = dataset.withColumn(_PREDICTED, predict(given))
        for index, (name, width) in enumerate(zip(names, self.widths, strict=True)):
            values = found[_PREDICTED][str(index)]
            found = found.withColumn(name, values[0].cast("double") if width == 1 else array_to_vector(values))
        return found.drop(_PREDICTED)


def _prediction(predictor: Callable[[], Predict], outputs: int, rows: int) -> Any:
    """Returns a pandas UDF from a structure of features to one of outputs, each an array."""
    import pandas as pd
    from pyspark.sql.functions import pandas_udf

    def predicted(parts: Any) -> Any:
        predict = predictor()  # once for each task, not for each part
        for part in parts:
            yield pd.concat([_predicted(predict, part[first : first + rows]) for first in range(0, len(part), rows)])

    frames = Iterator[pd.DataFrame]
    predicted.__annotations__ = {"parts": frames, "return": frames}  # by which Spark knows what it takes
    return pandas_udf(", ".join(f"`{index}` array<double>" for index in range(outputs)))(predicted)


def _predicted(predict: Predict, part: Any) -> Any:
    import numpy as np
    import pandas as pd

    columns = (part[name] for name in part.columns)
    outputs = predict(*(np.stack(each) if each.dtype == object else each.to_numpy() for each in columns))
    return pd.DataFrame({str(index): list(np.reshape(each, (len(part), -1))) for index, each in enumerate(outputs)})
