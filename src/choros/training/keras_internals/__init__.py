"""All that choros uses of ``keras.src`` and private attributes, and why: a new Keras changes only this folder."""
