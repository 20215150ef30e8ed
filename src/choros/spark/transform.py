"""What the models of estimators have in common: ``transform``, in pandas UDFs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.ml import Model

from choros.errors import ConfigError
from choros.spark.parameters import Parameterized, with_parameters

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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


@with_parameters(_MODEL)
class EstimatorModel(Model, Parameterized):
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
