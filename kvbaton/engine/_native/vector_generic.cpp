// The float32 engine for any processor.
#include <algorithm>
#include <cstring>

#include "model.h"
#include "threads.h"

#define KVB_AVX512 0
#define KVB_AVX512_BF16 0

namespace kvb {
namespace generic {
#include "vector_ops.h"
#include "vector_engine.h"
}  // namespace generic
const Engine* generic_engine() { return &generic::kEngine; }
}  // namespace kvb
