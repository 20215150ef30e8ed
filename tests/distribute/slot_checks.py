"""Every optimizer of Keras on two servers, which are objects here: what they keep, their successors go on with."""

from __future__ import annotations

from contextlib import nullcontext

import cloudpickle
import keras
import numpy as np
from keras import optimizers

from choros.distribute.partitioners import FixedShardsPartitioner
from choros.parameter_server.placement import SlotKey, join, place, place_slots, split
from choros.parameter_server.server import Shards
from choros.parameter_server.slots import Slots

CUT = (
    lambda: optimizers.SGD(0.1),
    lambda: optimizers.SGD(0.1, momentum=0.9),
    optimizers.Adam,
    lambda: optimizers.Adam(amsgrad=True, use_ema=True),
    optimizers.AdamW,
    optimizers.Nadam,
    optimizers.Adamax,
    optimizers.Adagrad,
    optimizers.Adadelta,
    lambda: optimizers.RMSprop(momentum=0.9, centered=True),
    optimizers.Ftrl,
    optimizers.Lion,
    optimizers.ScheduleFreeAdamW,
)
#: These look at a variable as a whole.
WHOLE = (optimizers.Lamb, optimizers.Adafactor, optimizers.Muon)
VARIABLES = {(0, 0): (6, 4), (0, 1): (4,), (0, 2): (4, 3)}


def random(seed):
    generator = np.random.default_rng(seed)
    return {key: generator.normal(size=shape).astype("float32") for key, shape in VARIABLES.items()}


def in_order(parts):
    return [parts[server] for server in sorted(parts)]


def without_gradients():
    if keras.backend.backend() != "torch":
        return nullcontext()
    import torch

    return torch.no_grad()


def check_all():
    """Eagerly: each would have to be compiled otherwise."""
    for make in CUT:
        check(make, FixedShardsPartitioner(2))
    for make in WHOLE:
        check(make, None)


def check(make, partition):
    plain, chief = make(), make()
    alone, copies = ([keras.Variable(value) for value in random(0).values()] for _ in range(2))
    plain.build(alone)
    slots = Slots(chief)
    slots.build(copies, chief.build)
    keys = dict(zip(map(id, copies), VARIABLES, strict=True))
    kept = {SlotKey(1, i, None if v is None else keys[id(v)]): slot for i, v, slot in slots}
    placement = place({key: (shape, "float32") for key, shape in VARIABLES.items()}, partition, 2)
    placement = {**placement, **place_slots(kept, placement, 2)}
    recipe = cloudpickle.dumps((type(plain), plain.get_config())), dict.fromkeys(VARIABLES, (True, None))
    state = random(0)
    for life in range(2):
        servers = [Shards(), Shards()]
        for server, part in zip(servers, in_order(split(state, placement)), strict=True):
            server.assign(part)
            server.register(1, *recipe)
        for step in range(3):
            gradients = random(10 * life + step + 1)
            for server, part in zip(servers, in_order(split(gradients, placement)), strict=True):
                server.push(1, part, None, 0)
            with without_gradients():
                plain.apply([keras.ops.convert_to_tensor(gradient) for gradient in gradients.values()])
        one, other = (server.pull(0, slots=True)[1] for server in servers)
        state = {key: join(key, placement, {**one, **other}) for key in placement}
    for key, slot in kept.items():
        slot.assign(state[key])
    for one, another in zip(chief.variables, plain.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), another.numpy(), rtol=1e-4, atol=1e-6, err_msg=one.path)
    for key, variable in zip(VARIABLES, alone, strict=True):
        np.testing.assert_allclose(state[key], variable.numpy(), rtol=1e-4, atol=1e-6)
