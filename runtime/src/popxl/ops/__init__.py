"""The ops of PopXL: functions that add an op to the current graph."""

import sys as _sys

from popxl._ir import tensor_operators as _operators
from popxl._ir.public_names import collect_public_names as _collect_public_names
from popxl.ops._getitem import getitem as _getitem
from popxl.ops._windows import PadType as PadType
from popxl.ops.activation import gelu as gelu
from popxl.ops.activation import gelu_ as gelu_
from popxl.ops.activation import geluerf as geluerf
from popxl.ops.activation import geluerf_ as geluerf_
from popxl.ops.activation import relu as relu
from popxl.ops.activation import relu_ as relu_
from popxl.ops.activation import softmax as softmax
from popxl.ops.activation import swish as swish
from popxl.ops.activation import swish_ as swish_
from popxl.ops.activation import tanh as tanh
from popxl.ops.arithmetic import add as add
from popxl.ops.arithmetic import add_ as add_
from popxl.ops.arithmetic import div as div
from popxl.ops.arithmetic import fmod as fmod
from popxl.ops.arithmetic import increment_mod as increment_mod
from popxl.ops.arithmetic import increment_mod_ as increment_mod_
from popxl.ops.arithmetic import maximum as maximum
from popxl.ops.arithmetic import mul as mul
from popxl.ops.arithmetic import pow as pow
from popxl.ops.arithmetic import scaled_add as scaled_add
from popxl.ops.arithmetic import scaled_add_ as scaled_add_
from popxl.ops.arithmetic import sub as sub
from popxl.ops.attention import attention as attention
from popxl.ops.call import CallSiteInfo as CallSiteInfo
from popxl.ops.call import call as call
from popxl.ops.call import call_with_info as call_with_info
from popxl.ops.conditional import conditional as conditional
from popxl.ops.conditional import conditional_with_info as conditional_with_info
from popxl.ops.convolution import conv as conv
from popxl.ops.convolution import conv_pow2scaled as conv_pow2scaled
from popxl.ops.convolution import conv_transpose as conv_transpose
from popxl.ops.convolution import conv_transpose_pow2scaled as conv_transpose_pow2scaled
from popxl.ops.dynamic import dynamic_slice as dynamic_slice
from popxl.ops.dynamic import dynamic_update as dynamic_update
from popxl.ops.dynamic import dynamic_update_ as dynamic_update_
from popxl.ops.elementwise import abs as abs
from popxl.ops.elementwise import cast as cast
from popxl.ops.elementwise import ceil as ceil
from popxl.ops.elementwise import clamp as clamp
from popxl.ops.elementwise import clip as clip
from popxl.ops.elementwise import cos as cos
from popxl.ops.elementwise import detach as detach
from popxl.ops.elementwise import detach_ as detach_
from popxl.ops.elementwise import exp as exp
from popxl.ops.elementwise import exp_ as exp_
from popxl.ops.elementwise import floor as floor
from popxl.ops.elementwise import identity as identity
from popxl.ops.elementwise import isfinite as isfinite
from popxl.ops.elementwise import isinf as isinf
from popxl.ops.elementwise import isnan as isnan
from popxl.ops.elementwise import log as log
from popxl.ops.elementwise import log2 as log2
from popxl.ops.elementwise import negate as negate
from popxl.ops.elementwise import rename as rename
from popxl.ops.elementwise import sign as sign
from popxl.ops.elementwise import sin as sin
from popxl.ops.elementwise import sqrt as sqrt
from popxl.ops.float8_143_152 import matmul_pow2scaled as matmul_pow2scaled
from popxl.ops.float8_143_152 import pow2scale_cast_from_fp8 as pow2scale_cast_from_fp8
from popxl.ops.float8_143_152 import pow2scale_cast_to_fp8 as pow2scale_cast_to_fp8
from popxl.ops.gathering import gather as gather
from popxl.ops.gathering import groupedgather as groupedgather
from popxl.ops.gathering import onehot as onehot
from popxl.ops.gathering import scatter as scatter
from popxl.ops.gathering import tied_gather as tied_gather
from popxl.ops.gathering import topk as topk
from popxl.ops.grouped import grouped_matmul as grouped_matmul
from popxl.ops.host import host_load as host_load
from popxl.ops.host import host_store as host_store
from popxl.ops.linalg import matmul as matmul
from popxl.ops.logic import equal as equal
from popxl.ops.logic import greater as greater
from popxl.ops.logic import logical_and as logical_and
from popxl.ops.logic import logical_not as logical_not
from popxl.ops.logic import logical_or as logical_or
from popxl.ops.logic import where as where
from popxl.ops.loss import nll_loss as nll_loss
from popxl.ops.loss import nll_loss_with_softmax_grad as nll_loss_with_softmax_grad
from popxl.ops.normalisation import batch_norm_inference as batch_norm_inference
from popxl.ops.normalisation import group_norm as group_norm
from popxl.ops.normalisation import layer_norm as layer_norm
from popxl.ops.placement import code_copy as code_copy
from popxl.ops.placement import init as init
from popxl.ops.placement import io_tile_copy as io_tile_copy
from popxl.ops.placement import ipu_copy as ipu_copy
from popxl.ops.placement import materialise as materialise
from popxl.ops.placement import print_tensor as print_tensor
from popxl.ops.placement import remote_code_load as remote_code_load
from popxl.ops.pooling import average_pool as average_pool
from popxl.ops.pooling import max_pool as max_pool
from popxl.ops.random import create_random_seed as create_random_seed
from popxl.ops.random import dropout as dropout
from popxl.ops.random import random_normal as random_normal
from popxl.ops.random import random_uniform as random_uniform
from popxl.ops.random import shaped_dropout as shaped_dropout
from popxl.ops.random import split_random_seed as split_random_seed
from popxl.ops.reduction import argmax as argmax
from popxl.ops.reduction import argmin as argmin
from popxl.ops.reduction import cumsum as cumsum
from popxl.ops.reduction import l1 as l1
from popxl.ops.reduction import l2 as l2
from popxl.ops.reduction import lamb_square as lamb_square
from popxl.ops.reduction import logsum as logsum
from popxl.ops.reduction import logsumexp as logsumexp
from popxl.ops.reduction import max as max
from popxl.ops.reduction import mean as mean
from popxl.ops.reduction import median as median
from popxl.ops.reduction import min as min
from popxl.ops.reduction import prod as prod
from popxl.ops.reduction import sum as sum
from popxl.ops.reduction import sumsquare as sumsquare
from popxl.ops.remote import remote_load as remote_load
from popxl.ops.remote import remote_load_ as remote_load_
from popxl.ops.remote import remote_store as remote_store
from popxl.ops.repeat import repeat as repeat
from popxl.ops.repeat import repeat_with_info as repeat_with_info
from popxl.ops.scattering import grouped_scatter_reduce as grouped_scatter_reduce
from popxl.ops.scattering import histogram as histogram
from popxl.ops.scattering import scatter_reduce as scatter_reduce
from popxl.ops.shape import concat as concat
from popxl.ops.shape import concat_ as concat_
from popxl.ops.shape import flatten as flatten
from popxl.ops.shape import flatten_ as flatten_
from popxl.ops.shape import reshape as reshape
from popxl.ops.shape import reshape_ as reshape_
from popxl.ops.shape import split as split
from popxl.ops.shape import squeeze as squeeze
from popxl.ops.shape import transpose as transpose
from popxl.ops.shape import transpose_ as transpose_
from popxl.ops.slicing import slice as slice
from popxl.ops.slicing import slice_ as slice_
from popxl.ops.slicing import subsample as subsample
from popxl.ops.vision import interpolate as interpolate
from popxl.ops.vision import roi_align as roi_align

from popxl.ops import collectives as collectives  # isort: skip
from popxl.ops import fp8_e4m3_e5m2 as fp8  # isort: skip
from popxl.ops import utils as utils  # isort: skip
from popxl.ops import var_updates as var_updates  # isort: skip
from popxl._compat import module_paths as _paths  # isort: skip

_paths.register_module_paths(__name__)

__all__ = [*_collect_public_names(globals()), "collectives", "fp8", "var_updates"]

_operators.register_ops(_sys.modules[__name__], _getitem)
