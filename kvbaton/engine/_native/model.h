// The model as the kernels see it: packed weights, one step's input, scratch memory.
//
// Invariants: every activation buffer has its rows padded to a multiple of 16 and its columns to a multiple of 32, so that
// a kernel never needs a ragged tile; padded columns of weights and activations are zero, padded rows are never read back.
// A row's result depends on that row alone: no kernel may choose another order of operations because of the batch.
//
// Knows nothing about Python, tokens' meaning, or who owns a block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvb {

constexpr int kTileRows = 16;    // rows of one activation tile
constexpr int kGroup = 32;       // k values of one tile, and of one quantisation group
constexpr int kPanelCols = 32;   // output columns of one weight panel: two tiles

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

enum Format : int32_t { kF32 = 0, kBF16 = 1, kInt8 = 2, kInt4 = 3 };
enum KvType : int32_t { kKvF32 = 0, kKvBF16 = 1, kKvE4M3 = 2 };
enum EngineKind : int32_t { kGeneric = 0, kAvx512 = 1, kAvx512Bf16 = 2, kAmx = 3 };

// Mirrors native.py's _Config, field by field.
struct Config {
  int32_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate, vocab;
  int32_t qk_norm, bf16, block_size, kv_type, num_threads, engine;
  float eps, attention_scale, rope_factor;
};

// y = x W^T, W packed in panels of 32 output columns.
//
//   kF32   [k][32]                                   one float per weight
//   kBF16  [k/32][2 tiles][16 k pairs][16 cols][2]   the B operand of TDPBF16PS
//   kInt8  [k/32] { fp16 scale[32]; 2 tiles x 512 bytes, see int8_position() }
//   kInt4  [k/32] { fp16 scale[32]; fp16 min[32]; 2 tiles x 256 bytes, see int4_position() }
struct Linear {
  Format format = kF32;
  int n = 0, k = 0;            // as the model has them
  int panels = 0, groups = 0;  // ceil(n / 32), ceil(k / 32)
  size_t panel_bytes = 0;
  uint8_t* data = nullptr;
  float* bias = nullptr;  // padded to panels * 32, or null
  const uint8_t* panel(int index) const { return data + size_t(index) * panel_bytes; }
};

constexpr size_t kInt8GroupBytes = 64 + 1024;
constexpr size_t kInt4GroupBytes = 128 + 512;

struct Layer {
  Linear qkv, o, gate_up, down;
  float *input_norm = nullptr, *post_norm = nullptr, *q_norm = nullptr, *k_norm = nullptr;
  int window = 0;  // 0: attends to every earlier key
};

// Mirrors native.py's _Step.
struct Step {
  int32_t num_rows, num_seqs, max_blocks, num_samples;
  int64_t num_blocks;
  const int32_t *token_ids, *positions, *seq_starts, *block_table, *sample_rows;
  uint8_t* kv;
  float* logits;
};

// A buffer that only grows.
struct Buffer {
  void* data = nullptr;
  size_t size = 0;
  void* reserve(size_t bytes);
  template <class T> T* as(size_t count) { return static_cast<T*>(reserve(count * sizeof(T))); }
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  ~Buffer();
};

struct ThreadScratch {
  Buffer panel, keys, values, lanes, key_pointers;
};

class ThreadPool;
struct Model;

// One implementation of the arithmetic: portable, AVX-512, AVX-512 with bfloat16 pairs, or AMX.
struct Engine {
  void (*run_layer)(Model&, const Step&, int layer);
  void (*logits)(Model&, const Step&);
  void (*products)(Model&, int rows);  // the layers' products alone, on whatever the buffers hold: what a benchmark compares with
};

struct Model {
  Config config;
  std::vector<Layer> layers;
  Linear head;
  float* final_norm = nullptr;
  void* embedding = nullptr;  // row-major [vocab][hidden], bf16 or float as config.bf16 says
  std::vector<float> inv_freq;
  const Engine* engine = nullptr;
  ThreadPool* pool = nullptr;
  std::vector<ThreadScratch> scratch;
  // Step state: the float32 residual stream [rows][hidden padded], and cos and sin [rows][head_dim / 2].
  Buffer residual, cosines, sines;
  // Row block state.
  Buffer normed, qkv, queries, attended, gated, digits, group_sums;
  std::vector<void*> owned;  // mappings, freed with the model
  uint8_t* arena = nullptr;
  size_t arena_left = 0;

  explicit Model(const Config& c);
  ~Model();
  uint8_t* allocate(size_t bytes);  // lives as long as the model, 64-byte aligned, in huge pages where the OS has them

  int hidden_padded() const { return int(round_up(config.hidden, kPanelCols)); }
  int group_heads() const { return config.num_heads / config.num_kv_heads; }
  size_t kv_itemsize() const { return config.kv_type == kKvF32 ? 4 : config.kv_type == kKvBF16 ? 2 : 1; }
  size_t head_block_bytes() const { return kv_itemsize() * config.block_size * config.head_dim; }
  // First byte of one head's keys (part 0) or values (part 1) of one block in one layer.
  uint8_t* kv_head(const Step& step, int layer, int block, int part, int head) const {
    size_t index = ((size_t(layer) * step.num_blocks + block) * 2 + part) * config.num_kv_heads + head;
    return step.kv + index * head_block_bytes();
  }
  uint8_t* kv_slot(const Step& step, int layer, int seq, int position, int part, int head) const {
    int block = step.block_table[size_t(seq) * step.max_blocks + position / config.block_size];
    size_t row = size_t(position % config.block_size) * config.head_dim * kv_itemsize();
    return kv_head(step, layer, block, part, head) + row;
  }
};

// Rows of one sequence inside a row block, the unit of attention together with a KV head.
struct Segment {
  int seq, begin, end;  // rows of the step
};

std::vector<Segment> segments_of(const Step& step, int begin, int end);
void begin_step(Model& model, const Step& step);  // embeddings and rotary tables

const Engine* generic_engine();
const Engine* avx512_engine();       // null where not compiled in, as the next
const Engine* avx512_bf16_engine();
const Engine* amx_engine();          // null where not compiled in
EngineKind best_engine(bool bf16);

void pack_linear(Model& model, Linear& linear, Format format, int n, int k, const float* const* parts, const int* part_rows,
                 int num_parts, bool interleave);

float half_to_float(uint16_t half);
uint16_t float_to_half(float value);
inline uint16_t float_to_bf16(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16) | 0x40;
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline float bf16_to_float(uint16_t half) {
  uint32_t bits = uint32_t(half) << 16;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// Where a quantised tile (16 columns of W^T, that is rows of W, by 32 k) has element (k, col). int8: [k / 4][16 cols][4], 128 added,
// which is an operand of VNNI. int4: the same with the second half of k in the upper four bits.
inline size_t int8_position(int k, int col) { return size_t(k / 4) * 64 + col * 4 + k % 4; }
inline void int4_position(int k, int col, size_t* byte, int* shift) {
  *byte = int8_position(k % 16, col);
  *shift = k / 16 * 4;
}

}  // namespace kvb
