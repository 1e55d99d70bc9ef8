"""The packed formats: rounding weights to codes and scales, and what these stand for.

Round to nearest even, scales from the largest magnitude: int8 127, int4 7, int2 1, FP8 448. A zero group has scale 1, so that
nothing is divided by zero.
"""

import torch

FP8_BLOCK = 128


def names(format: str) -> tuple[str, int | None]:
    """A format name as (kind, group size): int8, int4, int4-g64 (any number), int2, fp8, mxfp4."""
    kind, _, group = format.partition("-g")
    return kind, int(group) if group else None


def scale_of(largest: torch.Tensor, top: float) -> torch.Tensor:
    return torch.where(largest > 0, largest / top, torch.ones_like(largest))


def codes_of(weights: torch.Tensor, scales: torch.Tensor, top: int) -> torch.Tensor:
    return (weights / scales).round().clamp(-top, top)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [rows, cols] as a one-dimensional tensor of bytes, the first code of a byte lowest, rows padded with zero bits."""
    rows, cols = codes.shape
    per_byte = 8 // bits
    fields = torch.zeros(rows, -(-cols // per_byte) * per_byte, dtype=torch.int64)
    offset = 0 if bits == 8 else 1 << (bits - 1)
    fields[:, :cols] = (codes.to(torch.int64) + offset) % (1 << bits)
    shifts = torch.arange(per_byte) * bits
    return (fields.view(rows, -1, per_byte) << shifts).sum(-1).to(torch.uint8).flatten()


def integer(weights: torch.Tensor, bits: int, group: int | None):
    """(packed, scales, values) with one scale a row, or one for each `group` columns of a row."""
    rows, cols = weights.shape
    top = (1 << (bits - 1)) - 1
    group = group or cols
    count = -(-cols // group)
    padded = torch.zeros(rows, count * group)
    padded[:, :cols] = weights
    scales = scale_of(padded.view(rows, count, group).abs().amax(-1), top)
    spread = scales.repeat_interleave(group, dim=1)[:, :cols]
    codes = codes_of(weights, spread, top)
    return pack(codes, bits), scales.flatten(), codes * spread


def fp8(weights: torch.Tensor):
    """(F8_E4M3 matrix, scales of its 128 by 128 blocks, values)."""
    rows, cols = weights.shape
    high, wide = -(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK)
    padded = torch.zeros(high * FP8_BLOCK, wide * FP8_BLOCK)
    padded[:rows, :cols] = weights
    scales = scale_of(padded.view(high, FP8_BLOCK, wide, FP8_BLOCK).abs().amax((1, 3)), 448.0)
    spread = scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)[:rows, :cols]
    codes = (weights / spread).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * spread


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def mxfp4(weights: torch.Tensor):
    """(blocks, scales, values) of experts [experts, inputs, outputs], as the library has them: they are stored by outputs, in groups of 32 inputs
    with the exponent of a power of two, the first code of a byte lowest."""
    experts, inputs, outputs = weights.shape
    groups = weights.transpose(1, 2).reshape(experts, outputs, inputs // 32, 32)
    largest = groups.abs().amax(-1)
    # The largest code has the exponent 2.
    exponents = torch.where(largest > 0, largest.log2().floor() - 2, 0.0)
    scaled = groups / exponents.exp2()[..., None]
    nearest = (scaled.abs()[..., None] - FP4).abs().argmin(-1)
    values = FP4[nearest] * scaled.sign() * exponents.exp2()[..., None]
    nibbles = nearest + 8 * (scaled < 0)
    blocks = (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).to(torch.uint8)
    return blocks, (exponents + 127).to(torch.uint8), values.reshape(experts, outputs, inputs).transpose(1, 2).contiguous()


def readable(cols: int, group: int) -> bool:
    """Whether a reader finds this group size: the power of two that gives as many groups, else the exact quotient."""
    count = -(-cols // group)
    power = next((1 << p for p in range(31) if -(-cols // (1 << p)) == count), None)
    return count == 1 or group == (power or (cols / count))


def quantise(name: str, weights: torch.Tensor, format: str) -> tuple[dict, torch.Tensor]:
    """The stored tensors of one matrix by name, and the f32 values that they stand for."""
    kind, group = names(format)
    if kind == "fp8":
        codes, scales, values = fp8(weights)
        return {name: codes, f"{name}_scale_inv": scales}, values
    if kind == "mxfp4":
        blocks, scales, values = mxfp4(weights)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}, values
    if group and not readable(weights.shape[1], group):
        raise ValueError(f"{name}: no reader finds groups of {group} in {weights.shape[1]} columns")
    bits = {"int8": 8, "int4": 4, "int2": 2}[kind]
    packed, scales, values = integer(weights, bits, group)
    return {name: packed, f"{name}.qs": scales}, values


def expand(tensors: dict, formats: dict) -> tuple[dict, dict]:
    """Quantises the tensors that `formats` names. Returns what is stored, and the f32 values for the reference."""
    stored, values = {}, {}
    for name, tensor in tensors.items():
        if name in formats:
            parts, values[name] = quantise(name, tensor.float(), formats[name])
            stored.update(parts)
        else:
            stored[name] = values[name] = tensor
    return stored, values


def stamps(formats: dict) -> dict:
    """The names of the formats in a container's metadata."""
    def stamp(format: str) -> str:
        kind, group = names(format)
        return "fp8-e4m3-b128" if kind == "fp8" else "int4-grouped" if group else f"{kind}-row"

    return {name: stamp(format) for name, format in formats.items()}
