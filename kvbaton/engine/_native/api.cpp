// The C interface that native.py loads with ctypes. Arguments were checked there; nothing here may be called otherwise.
#include <cstring>
#include <exception>
#include <new>

#include "model.h"
#include "threads.h"

using namespace kvb;

namespace {

float* copy_padded(Model& model, const float* from, int size, int padded) {
  auto* out = reinterpret_cast<float*>(model.allocate(size_t(padded) * 4));
  std::memcpy(out, from, size_t(size) * 4);
  return out;
}

Linear* linear_of(Model& model, int layer, int which) {
  if (which == 4) return &model.head;
  Layer& l = model.layers[layer];
  Linear* all[] = {&l.qkv, &l.o, &l.gate_up, &l.down};
  return all[which];
}

}  // namespace

extern "C" {

int kvb_abi_version() { return 3; }

int kvb_best_engine(int bf16) { return best_engine(bf16 != 0); }

void* kvb_create(const Config* config, const float* inv_freq) {
  try {
    auto* model = new Model(*config);
    model->inv_freq.assign(inv_freq, inv_freq + config->head_dim / 2);
    const Engine* engines[] = {generic_engine(), avx512_engine(), avx512_bf16_engine(), amx_engine()};
    model->engine = engines[config->engine];
    return model;
  } catch (const std::exception&) {
    return nullptr;
  }
}

void kvb_destroy(void* handle) { delete static_cast<Model*>(handle); }

// which: 0 qkv, 1 o, 2 gate and up (interleaved), 3 down, 4 lm head. Returns 0, or 1 when memory ran out.
int kvb_set_linear(void* handle, int layer, int which, int format, int n, int k, const float* const* parts,
                   const int* part_rows, int num_parts, const float* bias) {
  auto& model = *static_cast<Model*>(handle);
  try {
    Linear& linear = *linear_of(model, layer, which);
    pack_linear(model, linear, Format(format), n, k, parts, part_rows, num_parts, which == 2);
    if (bias) linear.bias = copy_padded(model, bias, linear.panels * kPanelCols, linear.panels * kPanelCols);  // in panel order
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// which: 0 input norm, 1 post-attention norm, 2 q norm, 3 k norm, 4 final norm.
int kvb_set_norm(void* handle, int layer, int which, const float* weight, int size) {
  auto& model = *static_cast<Model*>(handle);
  try {
    float* copy = copy_padded(model, weight, size, int(round_up(size, kPanelCols)));
    if (which == 4) {
      model.final_norm = copy;
      return 0;
    }
    Layer& l = model.layers[layer];
    float** all[] = {&l.input_norm, &l.post_norm, &l.q_norm, &l.k_norm};
    *all[which] = copy;
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

int kvb_set_embedding(void* handle, const float* weight) {
  auto& model = *static_cast<Model*>(handle);
  try {
    size_t count = size_t(model.config.vocab) * model.config.hidden;
    model.embedding = model.allocate(count * (model.config.bf16 ? 2 : 4));
    if (model.config.bf16) {
      auto* out = static_cast<uint16_t*>(model.embedding);
      for (size_t i = 0; i < count; i++) out[i] = float_to_bf16(weight[i]);
    } else {
      std::memcpy(model.embedding, weight, count * 4);
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

void kvb_set_window(void* handle, int layer, int window) { static_cast<Model*>(handle)->layers[layer].window = window; }

int kvb_begin(void* handle, const Step* step) {
  try {
    begin_step(*static_cast<Model*>(handle), *step);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

int kvb_layers(void* handle, const Step* step, int first, int last) {
  auto& model = *static_cast<Model*>(handle);
  try {
    for (int layer = first; layer < last; layer++) model.engine->run_layer(model, *step, layer);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

int kvb_logits(void* handle, const Step* step) {
  auto& model = *static_cast<Model*>(handle);
  try {
    model.engine->logits(model, *step);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// For benchmarks: the layers' products alone for `rows` rows.
int kvb_products(void* handle, int rows) {
  auto& model = *static_cast<Model*>(handle);
  try {
    model.engine->products(model, rows);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// For benchmarks: bytes of weights that one decode step reads, and reading them all once.
int64_t kvb_weight_bytes(void* handle) {
  auto& model = *static_cast<Model*>(handle);
  size_t total = model.head.panel_bytes * model.head.panels;
  for (const Layer& l : model.layers)
    for (const Linear* w : {&l.qkv, &l.o, &l.gate_up, &l.down}) total += w->panel_bytes * w->panels;
  return int64_t(total);
}

uint64_t kvb_read_weights(void* handle) {
  auto& model = *static_cast<Model*>(handle);
  uint64_t sum = 0;
  auto read = [&sum](const Linear& w) {
    const auto* p = reinterpret_cast<const uint64_t*>(w.data);
    size_t count = w.panel_bytes * w.panels / 8;
    constexpr size_t kAhead = 512;  // 4 KiB: as far as the kernels look ahead, or the limit would be one of latency
    for (size_t i = 0; i + 8 <= count; i += 8) {
      __builtin_prefetch(p + i + kAhead);
      for (int j = 0; j < 8; j++) sum += p[i + j];
    }
  };
  for (const Layer& l : model.layers)
    for (const Linear* w : {&l.qkv, &l.o, &l.gate_up, &l.down}) read(*w);
  read(model.head);
  return sum;
}

// Index of the largest of each row, the first one of equals; NaN never wins.
void kvb_argmax(const float* logits, int rows, int vocab, int32_t* out) {
  for (int row = 0; row < rows; row++) {
    const float* x = logits + size_t(row) * vocab;
    int best = 0;
    constexpr int kChunk = 64;
    float largest = -__builtin_inff();
    for (int start = 0; start < vocab; start += kChunk) {
      int end = start + kChunk < vocab ? start + kChunk : vocab;
      float peak = -__builtin_inff();
      for (int i = start; i < end; i++) peak = x[i] > peak ? x[i] : peak;
      if (peak > largest) {
        largest = peak;
        for (best = start; x[best] != peak; best++) {
        }
      }
    }
    out[row] = best;
  }
}

}  // extern "C"
