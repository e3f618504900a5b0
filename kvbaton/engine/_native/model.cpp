// Memory, packing and the parts of a step that are no arithmetic to speak of.
#include "model.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#include "threads.h"

namespace kvb {

namespace {

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kArenaChunk = size_t(64) << 20;

void* map_pages(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(memory, bytes, MADV_HUGEPAGE);  // a hint; without it the kernels are right but slower
#endif
  return memory;
}

}  // namespace

void* Buffer::reserve(size_t bytes) {
  if (bytes > size) {
    std::free(data);
    size = size_t(round_up(int64_t(bytes), bytes > kHugePage / 2 ? kHugePage : 4096));
    data = std::aligned_alloc(size >= kHugePage ? kHugePage : 4096, size);
    if (!data) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (size >= kHugePage) madvise(data, size, MADV_HUGEPAGE);
#endif
    std::memset(data, 0, size);  // padded rows must hold numbers
  }
  return data;
}

Buffer::~Buffer() { std::free(data); }

Model::Model(const Config& c) : config(c), layers(c.num_layers), scratch(c.num_threads) {
  pool = new ThreadPool(c.num_threads);
}

Model::~Model() {
  delete pool;
  for (size_t i = 0; i + 1 < owned.size(); i += 2) munmap(owned[i], reinterpret_cast<size_t>(owned[i + 1]));
}

uint8_t* Model::allocate(size_t bytes) {
  bytes = size_t(round_up(int64_t(bytes), 64));
  if (bytes > arena_left) {
    size_t chunk = size_t(round_up(int64_t(std::max(bytes + kHugePage, kArenaChunk)), kHugePage));
    auto* base = static_cast<uint8_t*>(map_pages(chunk));
    owned.push_back(base);
    owned.push_back(reinterpret_cast<void*>(chunk));
    auto aligned = size_t(round_up(int64_t(reinterpret_cast<uintptr_t>(base)), kHugePage));
    arena = reinterpret_cast<uint8_t*>(aligned);
    arena_left = chunk - (aligned - reinterpret_cast<uintptr_t>(base));
  }
  uint8_t* result = arena;
  arena += bytes;
  arena_left -= bytes;
  return result;
}

float half_to_float(uint16_t half) {
  uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = (half >> 10) & 31, mantissa = half & 1023;
  if (exponent == 0) {
    float value = float(mantissa) * 0x1p-24f;
    return sign ? -value : value;
  }
  uint32_t bits = sign | ((exponent == 31 ? 255u : exponent + 112u) << 23) | (mantissa << 13);
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  uint16_t sign = uint16_t((bits >> 16) & 0x8000);
  float size = std::min(std::fabs(value), 65504.0f);
  if (size < 0x1p-14f) return sign | uint16_t(std::nearbyint(size * 0x1p24f));
  std::memcpy(&bits, &size, 4);
  return sign | uint16_t((bits + 0xfff + ((bits >> 13) & 1) - (112u << 23)) >> 13);
}

namespace {

// Fetches weight row `n` of the packed order, or null for padding.
struct RowSource {
  const float* const* parts;
  const int* part_rows;
  int num_parts, k;
  bool interleave;  // 16 rows of part 0, 16 of part 1, and so on: gate and up in the two tiles of one panel
  const float* row(int n) const {
    int part = 0;
    if (interleave) {
      part = (n / 16) % 2;
      n = n / 32 * 16 + n % 16;
      return n < part_rows[part] ? parts[part] + size_t(n) * k : nullptr;
    }
    while (part < num_parts && n >= part_rows[part]) n -= part_rows[part++];
    return part < num_parts ? parts[part] + size_t(n) * k : nullptr;
  }
};

size_t panel_bytes(Format format, int groups) {
  switch (format) {
    case kF32: return size_t(groups) * kGroup * kPanelCols * 4;
    case kBF16: return size_t(groups) * kGroup * kPanelCols * 2;
    case kInt8: return size_t(groups) * kInt8GroupBytes;
    default: return size_t(groups) * kInt4GroupBytes;
  }
}

size_t tile_index(int k, int col) {  // element of a [2][16][16][2] group
  return size_t(col / 16) * 512 + size_t(k / 2) * 32 + (col % 16) * 2 + k % 2;
}

void pack_int8(uint8_t* group, int col, const float* w, int count) {
  float largest = 0;
  for (int k = 0; k < count; k++) largest = std::max(largest, std::fabs(w[k]));
  uint16_t scale_bits = float_to_half(largest / 127);
  float scale = half_to_float(scale_bits);
  reinterpret_cast<uint16_t*>(group)[col] = scale_bits;
  uint8_t* out = group + 64;
  for (int k = 0; k < count; k++) {
    float q = scale > 0 ? std::nearbyint(w[k] / scale) : 0;
    out[(col / 16) * 512 + int8_position(k, col % 16)] = uint8_t(128 + int(std::min(127.0f, std::max(-127.0f, q))));
  }
}

void pack_int4(uint8_t* group, int col, const float* w, int count) {
  // A short last group keeps its padding at exactly zero times anything: the activations there are zero.
  float low = w[0], high = w[0];
  for (int k = 1; k < count; k++) low = std::min(low, w[k]), high = std::max(high, w[k]);
  uint16_t scale_bits = float_to_half((high - low) / 15), min_bits = float_to_half(low);
  float scale = half_to_float(scale_bits), minimum = half_to_float(min_bits);
  reinterpret_cast<uint16_t*>(group)[col] = scale_bits;
  reinterpret_cast<uint16_t*>(group)[32 + col] = min_bits;
  uint8_t* out = group + 128 + (col / 16) * 256;
  for (int k = 0; k < count; k++) {
    float q = scale > 0 ? std::nearbyint((w[k] - minimum) / scale) : 0;
    size_t byte;
    int shift;
    int4_position(k, col % 16, &byte, &shift);
    out[byte] |= uint8_t(int(std::min(15.0f, std::max(0.0f, q))) << shift);
  }
}

void pack_column(uint8_t* panel, Format format, int col, int k_size, const float* w) {
  for (int start = 0, group = 0; start < k_size; start += kGroup, group++) {
    int count = std::min(kGroup, k_size - start);
    switch (format) {
      case kF32:
        for (int k = 0; k < count; k++) reinterpret_cast<float*>(panel)[size_t(start + k) * 32 + col] = w[start + k];
        break;
      case kBF16:
        for (int k = 0; k < count; k++)
          reinterpret_cast<uint16_t*>(panel)[size_t(group) * 1024 + tile_index(k, col)] = float_to_bf16(w[start + k]);
        break;
      case kInt8: pack_int8(panel + size_t(group) * kInt8GroupBytes, col, w + start, count); break;
      case kInt4: pack_int4(panel + size_t(group) * kInt4GroupBytes, col, w + start, count); break;
    }
  }
}

}  // namespace

void pack_linear(Model& model, Linear& linear, Format format, int n, int k, const float* const* parts, const int* part_rows,
                 int num_parts, bool interleave) {
  linear.format = format;
  linear.n = n;
  linear.k = k;
  linear.panels = int(interleave ? round_up(n / 2, 16) / 16 : round_up(n, kPanelCols) / kPanelCols);
  linear.groups = int(round_up(k, kGroup) / kGroup);
  linear.panel_bytes = panel_bytes(format, linear.groups);
  if (!linear.data) linear.data = model.allocate(linear.panel_bytes * linear.panels);
  RowSource source{parts, part_rows, num_parts, k, interleave};
  model.pool->run(linear.panels, [&](int panel, int) {
    uint8_t* out = linear.data + size_t(panel) * linear.panel_bytes;
    for (int col = 0; col < kPanelCols; col++)
      if (const float* w = source.row(panel * kPanelCols + col)) pack_column(out, format, col, k, w);
  });
}

std::vector<Segment> segments_of(const Step& step, int begin, int end) {
  std::vector<Segment> result;
  for (int seq = 0; seq < step.num_seqs; seq++) {
    int first = std::max(begin, step.seq_starts[seq]), last = std::min(end, step.seq_starts[seq + 1]);
    if (first < last) result.push_back({seq, first, last});
  }
  return result;
}

void begin_step(Model& model, const Step& step) {
  const Config& c = model.config;
  int width = model.hidden_padded(), half = c.head_dim / 2;
  size_t rows = size_t(round_up(step.num_rows, 32));
  auto* residual = model.residual.as<float>(rows * width);
  auto* cosines = model.cosines.as<float>(rows * half);
  auto* sines = model.sines.as<float>(rows * half);
  for (int row = 0; row < step.num_rows; row++) {
    float* out = residual + size_t(row) * width;
    size_t source = size_t(step.token_ids[row]) * c.hidden;
    if (c.bf16) {
      const auto* in = static_cast<const uint16_t*>(model.embedding) + source;
      for (int i = 0; i < c.hidden; i++) out[i] = bf16_to_float(in[i]);
    } else {
      std::memcpy(out, static_cast<const float*>(model.embedding) + source, size_t(c.hidden) * 4);
    }
    for (int i = c.hidden; i < width; i++) out[i] = 0;
    for (int i = 0; i < half; i++) {
      float angle = model.inv_freq[i] * float(step.positions[row]);
      cosines[size_t(row) * half + i] = std::cos(angle) * c.rope_factor;
      sines[size_t(row) * half + i] = std::sin(angle) * c.rope_factor;
    }
  }
}

}  // namespace kvb
