cat > train.py << 'EOF'
import choros
import keras
import numpy as np
from choros import distribute

points = np.random.default_rng(0).uniform(-1, 1, size=(8192, 2)).astype("float32")
inside = (np.hypot(*points.T) < 0.75).astype("int32")

strategy = distribute.MirroredStrategy()                 # this process meets the others
with strategy.scope():                                   # what is created here, they train together
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(2, "softmax")])
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])

model.fit(points, inside, batch_size=128, epochs=4, verbose=2)    # 64 rows of each batch in each of two processes
loss, accuracy = model.evaluate(points, inside, verbose=0)
print(f"process {choros.rank()} of {choros.size()}: accuracy {accuracy:.3f}")
EOF
chorosrun -np 2 python train.py
