"""Activations: values against NumPy over their whole range, NaN and infinities, and tails that stay zero."""

from __future__ import annotations

import conv_oracle
import numpy as np
import pytest
from conv_lab import check, data, rows

import blockconv as bc
from blockconv.core.activation import ACTIVATIONS, NUMBERS, Activation, activation
from blockconv.core.problem import Conv2dProblem

NAMES = tuple(conv_oracle.ACTIVATIONS)
WITH_PARAMETERS = (
    ("clip", 0.5, 2.0),  # maps 0 to 0.5
    ("clip", -2.0),
    ("leaky_relu", 0.2),
    ("leaky_relu", -0.3),
    ("hardsigmoid", 0.2, 0.5),
    ("celu", 0.3),
)
ALL = (*NAMES, *WITH_PARAMETERS)
DTYPES = ("float32", "float64")
# Relative to the largest value; float64's worst is the oracle's own hardswish.
BOUND = {"float32": 1e-6, "float64": 1e-15}


def through(values, act, algorithm="direct"):
    """An activation of `values`, as a 1x1 convolution by 1 applies it."""
    x = values.reshape(1, 1, 1, -1)
    return bc.conv2d(x, np.ones((1, 1, 1, 1), x.dtype), activation=act, algorithm=algorithm).reshape(-1)


def test_the_oracle_has_every_name():
    assert set(NAMES) == set(ACTIVATIONS)


@pytest.mark.parametrize("act", ALL, ids=str)
def test_the_definition_agrees_with_the_oracle(act):
    """What constants are folded by; kernels are compared with the oracle below."""
    x = np.concatenate([np.linspace(-9, 9, 1001), [np.nan, np.inf, 1e9, -1e9]])
    with np.errstate(over="ignore"):
        found, wanted = activation(act).reference(x), conv_oracle.activate(x, act)
    np.testing.assert_allclose(found, wanted, rtol=1e-14, atol=1e-15)


def test_every_name_and_parameter_is_documented():
    for name, definition in ACTIVATIONS.items():
        assert definition.formula
        assert len(definition.parameters) <= 2
        for word in () if name == "none" else (name, *definition.parameters):
            assert word in bc.conv2d.__doc__, word
    assert "activation: as in `conv2d`" in bc.Conv2d.__doc__


def test_the_name_decides_the_number():
    """Plans of another version may have another number."""
    for name, number in NUMBERS.items():
        assert Activation(name, 99).number == number
    assert Activation("clip", 99, 0.0, 6.0) == activation(("clip", 0, 6))


@pytest.mark.parametrize("algorithm", ["direct", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ALL, ids=str)
@pytest.mark.sampled(3)
def test_values(act, dtype, algorithm):
    for scale in (1e-30, 1e-5, 1e-2, 1, 10, 100, 1e30):
        x = np.linspace(-scale, scale, 2017, dtype=dtype)
        error = conv_oracle.error(through(x, act, algorithm), conv_oracle.activate(x.astype("f8"), act))
        assert error < BOUND[dtype], scale


@pytest.mark.parametrize("algorithm", ["direct", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ALL, ids=str)
@pytest.mark.sampled(3)
def test_nan_infinity_and_the_ends_of_the_range(act, dtype, algorithm):
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, 88, 89, -88, -104, 720, -750], dtype)
    with np.errstate(over="ignore", under="ignore"):
        wanted = conv_oracle.activate(x.astype("f8"), act).astype(dtype)
    np.testing.assert_allclose(through(x, act, algorithm), wanted, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("algorithm", ["direct", "reference"])
@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-6), ("float64", 1e-14)])
@pytest.mark.parametrize("act", ["tanh", "silu", "mish", "celu", ("celu", 0.3), ("celu", -2.0)], ids=str)
def test_each_value_keeps_its_digits(act, dtype, rtol, algorithm):
    """Relative to the value itself: near zero, and where it goes to zero far below."""
    x = np.concatenate([np.linspace(-85, 85, 4001), np.linspace(-2, 2, 4001), np.logspace(-30, 1, 301)]).astype(dtype)
    x = np.concatenate([x, -x])
    wanted = conv_oracle.activate(x.astype("f8"), act)
    np.testing.assert_allclose(through(x, act, algorithm), wanted, rtol=rtol, atol=0)


TORCH = [name for name in NAMES if name not in ("none", "clip")]  # which torch has under the same names


@pytest.mark.parametrize("name", TORCH)
def test_the_oracle_agrees_with_torch(name):
    torch = pytest.importorskip("torch")
    function = getattr(torch.nn.functional, name)
    x = np.concatenate([np.linspace(-9, 9, 1001), [np.nan, np.inf, 1e9, -1e9]])
    np.testing.assert_allclose(
        conv_oracle.activate(x, name), function(torch.from_numpy(x)).numpy(), rtol=1e-13, atol=1e-15
    )
    # -inf: a product with zero is NaN, in torch as here.
    least = torch.tensor([-torch.inf], dtype=torch.float64)
    assert np.array_equal(conv_oracle.activate(least.numpy(), name), function(least).numpy(), equal_nan=True)


# Ragged in the source and the destination: a tail in every block, 33 = 32 + 1; and groups that fill no block.
PROBLEMS = ("mb1ic5ih5iw7oc33kh3kw3ph1pw1", "g3mb1ic12ih5iw7oc18kh3kw3ph1pw1")
PAIRS = (("NHWC", "NCHW4"), ("NCHW64", "NCHW8"), ("NCHW32", "NCHW16"), ("NHWC", "NCHW64"), ("NCHW16", "CHWN4"),
         ("NHWC", "NCHW"), ("NCHW32", "NCHW32"))  # fmt: skip


@pytest.mark.parametrize("act", [act for act in ALL if act != "none"], ids=str)  # as nearly all other tests have it
@pytest.mark.parametrize("specials", [False, True], ids=["finite", "specials"])
@pytest.mark.sampled(34)
def test_tails_are_zero_whatever_the_activation(act, specials):
    """Also where zero does not become zero, the residual is added, and NaN and infinities are about."""
    for k, descriptor in enumerate(PROBLEMS):
        p = Conv2dProblem.from_descriptor(descriptor)
        given = data(p, "floats", act=act, residual=True, specials=specials)
        for src, dst in PAIRS[(ALL.index(act) + 2 * k) % 4 :: 4]:  # each is compiled for each activation
            for row in rows(p, src, dst):
                check(row, p, src, dst, given, act)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("act", ["relu", ("clip", 0.5, 2.0), "hardsigmoid", "gelu"], ids=str)
def test_float64(act):
    p = Conv2dProblem.from_descriptor(PROBLEMS[0])
    given = data(p, "floats", "float64", act=act, residual=True)
    for src, dst in PAIRS[3:5]:
        for row in rows(p, src, dst, "float64"):
            check(row, p, src, dst, given, act)


def test_specifications():
    assert activation(None).is_identity
    assert activation("none").is_identity
    assert activation(("clip",)).is_identity
    assert not activation("relu").is_identity
    assert activation("relu") == activation(["relu"])
    assert activation(("leaky_relu",)) == activation("leaky_relu") == activation(("leaky_relu", 0.01))
    assert activation(("clip", -1)).second == np.inf


NONE = (
    "swish2",
    "exp",  # a function, which no convolution ends with
    ("relu", 1),
    ("clip", 1, 2, 3),
    ("clip", 3.0, -1.0),
    ("clip", "low"),
    ("clip", None),
    ("hardsigmoid", 1, 2, 3),
    (),
    3,
    "",
)


@pytest.mark.parametrize("spec", NONE, ids=str)
def test_what_is_no_activation(spec):
    x = np.ones((1, 1, 2, 2), np.float32)
    with pytest.raises(bc.ArgumentError, match=r"conv2d: activation="):
        bc.conv2d(x, x, activation=spec)
