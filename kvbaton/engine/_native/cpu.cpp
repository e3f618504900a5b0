// What this processor can do, and asking the kernel for the AMX tile state.
#include "model.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvb {

#if defined(__x86_64__)
namespace {

struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Leaf cpuid(unsigned leaf, unsigned subleaf) {
  Leaf r;
  __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
  return r;
}

uint64_t enabled_state() {  // XCR0: which registers the OS saves
  if (!(cpuid(1, 0).c & (1u << 27))) return 0;
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t(high) << 32) | low;
}

bool has_avx512() {
  Leaf leaf = cpuid(7, 0);
  unsigned wanted = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);  // F, DQ, BW, VL
  return (leaf.b & wanted) == wanted && (enabled_state() & 0xe6) == 0xe6;
}

bool has_avx512_bf16() { return cpuid(7, 1).a & (1u << 5); }

bool has_amx() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kVbmi = 1u << 1, kVnni = 1u << 11;
  Leaf leaf = cpuid(7, 0);
  if ((leaf.d & (kBf16 | kTile)) != (kBf16 | kTile) || (leaf.c & (kVbmi | kVnni)) != (kVbmi | kVnni) || !has_avx512_bf16()) return false;
  if ((enabled_state() & 0x60000) != 0x60000) return false;
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl: per process, inherited by threads
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

EngineKind best_engine(bool bf16) {
  if (!has_avx512() || !avx512_engine()) return kGeneric;
  static const bool amx = has_amx();
  if (bf16 && amx && amx_engine()) return kAmx;
  return bf16 && has_avx512_bf16() && avx512_bf16_engine() ? kAvx512Bf16 : kAvx512;
}
#else
EngineKind best_engine(bool) { return kGeneric; }
#endif

}  // namespace kvb
