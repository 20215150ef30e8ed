"""Trains with an estimator and without: ``estimators_script.py keras|torch DIRECTORY``; prints the differences."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from spark_face.digits import digits, vectors
from spark_face.sessions import cluster

RANKS, BATCH, EPOCHS = 2, 32, 3


def with_keras(df, x, y, store):
    """The weights of the estimator's model and of plain Keras, the losses, and the predictions of both."""
    import keras

    from choros.keras.callbacks import LearningRateScheduleCallback
    from choros.spark.keras import KerasEstimator

    def built():
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Input((8, 8, 1)), keras.layers.Conv2D(4, 3, activation="tanh"), keras.layers.Flatten()]
        return keras.Sequential([*layers, keras.layers.Dense(10, activation="softmax")])

    loss = "sparse_categorical_crossentropy"
    given = {"feature_cols": ["features"], "label_cols": ["label"], "batch_size": BATCH, "epochs": EPOCHS, "verbose": 0}
    estimator = KerasEstimator(
        num_proc=RANKS, store=store, model=built(), optimizer=keras.optimizers.SGD(0.05), loss=loss,
        metrics=["accuracy"], shuffle=False, callbacks=[LearningRateScheduleCallback(0.05)], use_gpu=False, **given,
    )  # fmt: skip
    trained = estimator.fit(df).setOutputCols(["probabilities"])
    plain = built()
    plain.compile(keras.optimizers.SGD(0.05 * RANKS), loss)
    plain.fit(x.reshape(-1, 8, 8, 1), y, batch_size=BATCH * RANKS, epochs=EPOCHS, shuffle=False, verbose=0)
    expected = plain.predict(x.reshape(-1, 8, 8, 1), verbose=0)
    return trained, trained.keras().get_weights(), plain.get_weights(), trained.getHistory()["loss"], expected


def with_torch(df, x, y, store):
    """The same for PyTorch."""
    import torch

    from choros.spark.torch import TorchEstimator

    def built():
        torch.manual_seed(3)
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(144, 10)
        )

    def loss(output, label):
        return torch.nn.functional.cross_entropy(output, label.long().reshape(-1))

    model = built()
    given = {"feature_cols": ["features"], "label_cols": ["label"], "batch_size": BATCH, "epochs": EPOCHS, "verbose": 0}
    estimator = TorchEstimator(
        num_proc=RANKS, store=store, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.05, momentum=0.5),
        loss=loss, input_shapes=[[-1, 1, 8, 8]], shuffle=False, **given,
    )  # fmt: skip
    trained = estimator.fit(df).setOutputCols(["probabilities"])
    plain = built()
    optimizer = torch.optim.SGD(plain.parameters(), 0.05 * RANKS, momentum=0.5)
    inputs, labels = torch.from_numpy(x.astype("float32")).reshape(-1, 1, 8, 8), torch.from_numpy(y)
    for _ in range(EPOCHS):
        for first in range(0, len(x), BATCH * RANKS):
            chosen = slice(first, first + BATCH * RANKS)
            optimizer.zero_grad()
            loss(plain(inputs[chosen]), labels[chosen]).backward()
            optimizer.step()
    found = [each.detach().numpy() for each in trained.getModel().parameters()]
    losses = [epoch["train"]["loss"] for epoch in trained.getHistory()]
    return (
        trained,
        found,
        [each.detach().numpy() for each in plain.parameters()],
        losses,
        plain(inputs).detach().numpy(),
    )


def two_outputs(session, x, y):
    """A DataFrame with two labels, the rows' weights, and which rows are for validation; its arrays."""
    from pyspark.ml.linalg import Vectors

    random = np.random.default_rng(9)
    total, weight, held = x.sum(axis=1), random.uniform(0.5, 1.5, len(x)), random.uniform(size=len(x)) < 0.2
    marks = [True if each else (False, None)[row % 2] for row, each in enumerate(held)]
    columns = zip(x.tolist(), y.tolist(), total.tolist(), weight.tolist(), marks, strict=True)
    rows = [(Vectors.dense(row), *rest) for row, *rest in columns]
    names = ["features", "label", "total", "weight", "held"]
    return session.createDataFrame(rows, names).coalesce(1), total, weight, held


def keras_with_two_outputs(session, x, y, store):
    """How far the estimator's weights, and its loss on the rows for validation, are from plain Keras'."""
    import keras

    from choros.spark.keras import KerasEstimator

    def built():
        keras.utils.set_random_seed(4)
        inputs = keras.layers.Input((64,))
        hidden = keras.layers.Dense(12, activation="tanh")(inputs)
        return keras.Model(
            inputs, [keras.layers.Dense(10, activation="softmax")(hidden), keras.layers.Dense(1)(hidden)]
        )

    class Squares(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return keras.ops.mean(keras.ops.square(keras.ops.reshape(y_true, (-1, 1)) - y_pred), axis=-1)

    df, total, weight, held = two_outputs(session, x, y)
    terms = {"loss": ["sparse_categorical_crossentropy", Squares()], "loss_weights": [1.0, 0.01]}
    trained = KerasEstimator(
        num_proc=RANKS, store=store, model=built(), optimizer=keras.optimizers.SGD(0.02), **terms, shuffle=False,
        feature_cols=["features"], label_cols=["label", "total"], sample_weight_col="weight", validation="held",
        batch_size=BATCH, epochs=EPOCHS, verbose=0,
    ).fit(df)  # fmt: skip
    plain = built()
    plain.compile(keras.optimizers.SGD(0.02 * RANKS), **terms)
    kept, asked = ((x[mask], (y[mask], total[mask]), weight[mask]) for mask in (~held, held))
    plain.fit(
        kept[0], kept[1], sample_weight=kept[2], validation_data=asked, validation_batch_size=BATCH * RANKS,
        batch_size=BATCH * RANKS, epochs=EPOCHS, shuffle=False, verbose=0,
    )  # fmt: skip
    pairs = zip(trained.keras().get_weights(), plain.get_weights(), strict=True)
    losses = zip(trained.getHistory()["val_loss"], plain.history.history["val_loss"], strict=True)
    return [float(abs(own - other).max()) for own, other in pairs], [abs(own - other) for own, other in losses]


def torch_with_two_outputs(session, x, y, store):
    """The same for PyTorch, whose estimator has no weights of rows."""
    import torch

    from choros.spark.torch import TorchEstimator

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.label, self.total = (torch.nn.Linear(*size) for size in ((64, 12), (12, 10), (12, 1)))

        def forward(self, features):
            hidden = torch.tanh(self.hidden(features))
            return self.label(hidden), self.total(hidden)

    def built():
        torch.manual_seed(4)
        return Net()

    def entropy(output, label):
        return torch.nn.functional.cross_entropy(output, label.long().reshape(-1))

    def squares(output, label):
        return torch.nn.functional.mse_loss(output, label.reshape(-1, 1))

    df, total, _, held = two_outputs(session, x, y)
    model = built()
    trained = TorchEstimator(
        num_proc=RANKS, store=store, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.02), shuffle=False,
        loss=[entropy, squares], loss_weights=[1.0, 0.01], feature_cols=["features"], label_cols=["label", "total"],
        validation="held", batch_size=BATCH, epochs=EPOCHS, verbose=0,
    ).fit(df)  # fmt: skip
    plain = built()
    optimizer = torch.optim.SGD(plain.parameters(), 0.02 * RANKS)
    inputs, labels, totals = (torch.from_numpy(each.astype("float32")) for each in (x, y, total))

    def loss(chosen):
        outputs = plain(inputs[chosen])
        return entropy(outputs[0], labels[chosen]) + 0.01 * squares(outputs[1], totals[chosen])

    asked, losses = np.flatnonzero(held), []
    for epoch in trained.getHistory():
        kept = np.flatnonzero(~held)
        for first in range(0, len(kept), BATCH * RANKS):
            optimizer.zero_grad()
            loss(kept[first : first + BATCH * RANKS]).backward()
            optimizer.step()
        losses.append(abs(float(loss(asked)) - epoch["validation"]["loss"]))
    pairs = zip(trained.getModel().parameters(), plain.parameters(), strict=True)
    return [float((own - other).abs().max()) for own, other in pairs], losses


def main() -> None:
    """Trains, and prints what differs."""
    which, directory = sys.argv[1], Path(sys.argv[2])
    x, y = digits()
    with cluster(directory) as spark:
        df = vectors(spark.session, x, y)
        store = str(directory / "store")
        trained, found, plain, losses, expected = {"keras": with_keras, "torch": with_torch}[which](df, x, y, store)
        rows = trained.transform(df).collect()
        predicted = np.array([row.probabilities.toArray() for row in rows])
        two = {"keras": keras_with_two_outputs, "torch": torch_with_two_outputs}[which](spark.session, x, y, store)
        left = [" ".join(each.cmdline()) for each in spark.ranks()]
    pairs = list(zip(found, plain, strict=True))
    print(
        json.dumps(
            {
                "difference": max(float(abs(own - other).max()) for own, other in pairs),
                "predictions": float(abs(predicted - expected).max()),
                "losses": losses,
                "two outputs": max(two[0]),
                "validation": max(two[1]),
                "left": left,
                "files": [str(path) for path in (directory / "store").iterdir()],
            }
        )
    )


if __name__ == "__main__":
    main()
