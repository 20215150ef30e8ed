"""Horovod's API: a U-Net that is resumed from a checkpoint, on shards by index.

Every shard has the same four images twice, so that the mean over a shard is that over all data.
"""

import os

import keras
import numpy as np

import choros.keras as hvd

keras.utils.set_random_seed(1)
generator = np.random.default_rng(0)
imgs_train = np.tile(generator.normal(size=(8, 8, 8, 1)).astype("float32"), (4, 1, 1, 1))
imgs_mask_train = (imgs_train > 0).astype("float32")

hvd.init()


def dice_coef(y_true, y_pred):
    overlap = keras.ops.sum(y_true * y_pred, axis=(1, 2, 3))
    return (2 * overlap + 1) / (keras.ops.sum(y_true + y_pred, axis=(1, 2, 3)) + 1)


def dice_coef_loss(y_true, y_pred):
    return 1 - dice_coef(y_true, y_pred)


def get_unet():
    inputs = keras.Input((8, 8, 1))
    down = keras.layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    bottom = keras.layers.Conv2D(8, 3, padding="same", activation="relu")(keras.layers.MaxPooling2D()(down))
    up = keras.layers.Conv2DTranspose(4, 2, strides=2, padding="same")(bottom)
    joined = keras.layers.Concatenate()([up, down])
    model = keras.Model(inputs, keras.layers.Conv2D(1, 1, activation="sigmoid")(joined))
    opt = keras.optimizers.Adam(float(os.environ["RATE"]) * hvd.size())
    opt = hvd.DistributedOptimizer(opt)
    model.compile(optimizer=opt, loss=dice_coef_loss, metrics=[dice_coef])
    return model


for resume_from_epoch in (0, 2):
    resume_from_epoch = hvd.broadcast(resume_from_epoch if hvd.rank() == 0 else -1, 0, name="resume_from_epoch")
    verbose = 1 if hvd.rank() == 0 else 0
    if resume_from_epoch > 0 and hvd.rank() == 0:
        model = hvd.load_model(
            "nddcheckpoint-{epoch}.h5".format(epoch=resume_from_epoch),
            custom_objects={"dice_coef": dice_coef, "dice_coef_loss": dice_coef_loss},
        )
    else:
        model = get_unet()

    number_of_examples_per_rank = imgs_train.shape[0] // hvd.size()
    remainder = imgs_train.shape[0] % hvd.size()
    if hvd.rank() < remainder:
        start_index = hvd.rank() * (number_of_examples_per_rank + 1)
        end_index = start_index + number_of_examples_per_rank + 1
    else:
        start_index = hvd.rank() * number_of_examples_per_rank + remainder
        end_index = start_index + number_of_examples_per_rank

    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    if hvd.rank() == 0:
        callbacks.append(
            keras.callbacks.ModelCheckpoint("nddcheckpoint-{epoch}.h5", monitor="val_loss", save_best_only=True)
        )
    history = model.fit(
        imgs_train[start_index:end_index],
        imgs_mask_train[start_index:end_index],
        batch_size=int(os.environ["PER_REPLICA"]),
        epochs=resume_from_epoch + 2,
        shuffle=True,
        validation_split=0.5,
        initial_epoch=resume_from_epoch,
        callbacks=callbacks,
        verbose=verbose,
    )
    print("Loss: {}, validation: {}".format(history.history["loss"], history.history["val_loss"]))

if hvd.rank() == 0:
    model.save("unetmodelfdd.h5", include_optimizer=False)
