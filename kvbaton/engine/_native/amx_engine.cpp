// The bfloat16 engine: AMX tiles for every product, AVX-512 for the rest, the residual stream in float32.
#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "model.h"
#include "threads.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx512vnni,fma,f16c,amx-tile,amx-bf16,prefer-vector-width=512")

#define KVB_AVX512 1
#define KVB_AVX512_BF16 1

namespace kvb {
namespace amx {
#include "vector_ops.h"

// 2^x to 9e-5, enough for what is rounded to bf16 next; exactly 1 at 0, exactly 0 far below and at minus infinity.
static inline __m512 exp2_bf16(__m512 x) {
  __m512 f = _mm512_reduce_ps(x, 1);  // x - floor(x); scalef takes the floor itself
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.07706704f), f, _mm512_set1_ps(0.227645f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69511679f));
  return _mm512_scalef_ps(_mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f)), x);
}

#include "amx_product.h"
#include "amx_quantised.h"
#include "amx_attention.h"
#include "amx_decode.h"
#include "amx_tasks.h"

static constexpr int kRowBlock = 256;

static void norm_rows(Model& model, const float* residual, const float* weight, const Packed& out, int first, int rows) {
  int width = model.hidden_padded();
  for (int row = 0; row < rows; row++) {
    const float* x = residual + size_t(row) * width;
    v16 factor = splat(rms_factor(x, width, model.config.hidden, model.config.eps));
    for (int i = 0; i < width; i += 16)
      store_bf16(out.at(first + row, i), load(x + i) * factor * load(weight + i));
  }
}

// Where the bias of a product that adds to the residual goes in first, as the tiles start from it.
static void add_bias(float* residual, int width, const Linear& linear, int rows) {
  if (!linear.bias) return;
  for (int row = 0; row < rows; row++)
    for (int i = 0; i < width; i += 16)
      store(residual + size_t(row) * width + i, load(residual + size_t(row) * width + i) + load(linear.bias + i));
}

static void pack_query_rows(const Config& c, const float* qkv, int stride, int rows, bf16_t* queries) {
  int width = int(round_up(c.head_dim, 32));
  for (int row = 0; row < rows; row++)
    for (int head = 0; head < c.num_heads; head++)
      for (int i = 0; i < c.head_dim; i += 16)
        store_bf16(queries + (size_t(row) * c.num_heads + head) * width + i, load(qkv + size_t(row) * stride + head * c.head_dim + i));
}

// Buffers of one row block.
struct Block {
  Packed normed, attended, gated;
  float* qkv;
  bf16_t* queries;
  Target store_qkv, silu;

  Block(Model& model, const Layer& w) {
    const Config& c = model.config;
    int width = model.hidden_padded(), stride = w.qkv.panels * 32;
    normed = {model.normed.as<bf16_t>(size_t(kRowBlock) * width), width / 32};
    attended = {model.attended.as<bf16_t>(size_t(kRowBlock) * w.o.groups * 32), w.o.groups};
    gated = {model.gated.as<bf16_t>(size_t(kRowBlock) * w.down.groups * 32), w.down.groups};
    qkv = model.qkv.as<float>(size_t(kRowBlock) * stride);
    queries = model.queries.as<bf16_t>(size_t(kRowBlock) * c.num_heads * round_up(c.head_dim, 32));
    store_qkv.data = qkv;
    store_qkv.stride = store_qkv.columns = stride;
    store_qkv.rows = kRowBlock;
    silu.packed = gated;
  }
};

static void run_layer(Model& model, const Step& step, int layer) {
  Layer& w = model.layers[layer];
  int width = model.hidden_padded(), qkv_stride = w.qkv.panels * 32;
  Block block(model, w);
  configure_tiles();
  for (int begin = 0; begin < step.num_rows; begin += kRowBlock) {
    int end = std::min(step.num_rows, begin + kRowBlock), rows = end - begin;
    Target add;
    add.data = static_cast<float*>(model.residual.data) + size_t(begin) * width;
    add.stride = width;
    norm_rows(model, add.data, w.input_norm, block.normed, 0, rows);
    product<Epilogue::kStore>(model, block.normed, rows, w.qkv, block.store_qkv);
    finish_qkv(model, step, layer, begin, end, block.qkv, qkv_stride);
    pack_query_rows(model.config, block.qkv, qkv_stride, rows, block.queries);
    attend(model, step, layer, begin, end, block.queries, block.attended);
    add_bias(add.data, width, w.o, rows);
    product<Epilogue::kAdd>(model, block.attended, rows, w.o, add);
    norm_rows(model, add.data, w.post_norm, block.normed, 0, rows);
    product<Epilogue::kSilu>(model, block.normed, rows, w.gate_up, block.silu);
    add_bias(add.data, width, w.down, rows);
    product<Epilogue::kAdd>(model, block.gated, rows, w.down, add);
  }
  _tile_release();
}

static void products(Model& model, int num_rows) {
  int width = model.hidden_padded();
  auto* residual = model.residual.as<float>(size_t(round_up(num_rows, 32)) * width);
  configure_tiles();
  for (Layer& w : model.layers) {
    Block block(model, w);
    for (int begin = 0; begin < num_rows; begin += kRowBlock) {
      int rows = std::min(num_rows - begin, kRowBlock);
      Target add;
      add.data = residual + size_t(begin) * width;
      add.stride = width;
      product<Epilogue::kStore>(model, block.normed, rows, w.qkv, block.store_qkv);
      product<Epilogue::kAdd>(model, block.attended, rows, w.o, add);
      product<Epilogue::kSilu>(model, block.normed, rows, w.gate_up, block.silu);
      product<Epilogue::kAdd>(model, block.gated, rows, w.down, add);
    }
  }
  _tile_release();
}

static void logits(Model& model, const Step& step) {
  int width = model.hidden_padded(), rows = step.num_samples;
  Packed normed{model.normed.as<bf16_t>(size_t(round_up(std::max(rows, kRowBlock), 16)) * width), width / 32};
  const auto* residual = static_cast<const float*>(model.residual.data);
  for (int i = 0; i < rows; i++)
    norm_rows(model, residual + size_t(step.sample_rows[i]) * width, model.final_norm, normed, i, 1);
  Target out;
  out.data = step.logits;
  out.stride = out.columns = model.config.vocab;
  out.rows = rows;
  configure_tiles();
  product<Epilogue::kStore>(model, normed, rows, model.head, out);
  _tile_release();
}

static const Engine kEngine = {run_layer, logits, products};
}  // namespace amx
const Engine* amx_engine() { return &amx::kEngine; }
}  // namespace kvb
#pragma GCC pop_options
#else
namespace kvb {
const Engine* amx_engine() { return nullptr; }
}  // namespace kvb
#endif
