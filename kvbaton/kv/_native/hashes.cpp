// Chains of block hashes: BLAKE2b (RFC 7693) with 16 bytes of output, of the hash before and the block's token ids.
//
// What Python's hashlib gives, without an object for each block. A plain C library for little-endian machines, loaded
// by native_hashes.py.

#include <cstdint>
#include <cstring>

namespace {

constexpr int kHashBytes = 16, kPartBytes = 128;
constexpr uint64_t kStart[8] = {0x6a09e667f3bcc908u, 0xbb67ae8584caa73bu, 0x3c6ef372fe94f82bu, 0xa54ff53a5f1d36f1u,
                                0x510e527fade682d1u, 0x9b05688c2b3e6c1fu, 0x1f83d9abfb41bd6bu, 0x5be0cd19137e2179u};
constexpr uint8_t kOrder[10][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
                                    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
                                    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
                                    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
                                    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
                                    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
                                    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
                                    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
                                    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

inline uint64_t turned(uint64_t word, int bits) { return word >> bits | word << (64 - bits); }

inline void quarter(uint64_t& a, uint64_t& b, uint64_t& c, uint64_t& d, uint64_t first, uint64_t second) {
    a += b + first, d = turned(d ^ a, 32), c += d, b = turned(b ^ c, 24);
    a += b + second, d = turned(d ^ a, 16), c += d, b = turned(b ^ c, 63);
}

template <int round>
inline void mix(uint64_t (&v)[16], const uint64_t* words) {
    constexpr const uint8_t* order = kOrder[round % 10];
    quarter(v[0], v[4], v[8], v[12], words[order[0]], words[order[1]]);
    quarter(v[1], v[5], v[9], v[13], words[order[2]], words[order[3]]);
    quarter(v[2], v[6], v[10], v[14], words[order[4]], words[order[5]]);
    quarter(v[3], v[7], v[11], v[15], words[order[6]], words[order[7]]);
    quarter(v[0], v[5], v[10], v[15], words[order[8]], words[order[9]]);
    quarter(v[1], v[6], v[11], v[12], words[order[10]], words[order[11]]);
    quarter(v[2], v[7], v[8], v[13], words[order[12]], words[order[13]]);
    quarter(v[3], v[4], v[9], v[14], words[order[14]], words[order[15]]);
}

// One part of the message; ``so_far`` counts its bytes with this part's.
void take(uint64_t* hash, const uint64_t* words, uint64_t so_far, bool last) {
    uint64_t v[16];
    std::memcpy(v, hash, sizeof(kStart));
    std::memcpy(v + 8, kStart, sizeof(kStart));
    v[12] ^= so_far;
    if (last) v[14] = ~v[14];
    mix<0>(v, words), mix<1>(v, words), mix<2>(v, words), mix<3>(v, words), mix<4>(v, words), mix<5>(v, words);
    mix<6>(v, words), mix<7>(v, words), mix<8>(v, words), mix<9>(v, words), mix<10>(v, words), mix<11>(v, words);
    for (int i = 0; i < 8; ++i) hash[i] ^= v[i] ^ v[i + 8];
}

}  // namespace

// ``parent`` is the hash that the first block follows; ``hashes`` has room for 16 bytes a block.
extern "C" void kvb_chain_hashes(const uint8_t* parent, const uint8_t* content, int64_t num_blocks, int64_t block_bytes,
                                 uint8_t* hashes) {
    const int64_t size = kHashBytes + block_bytes;
    for (int64_t block = 0; block < num_blocks; ++block, content += block_bytes, hashes += kHashBytes) {
        uint64_t hash[8], part[kPartBytes / 8];
        std::memcpy(hash, kStart, sizeof(kStart));
        hash[0] ^= 0x01010000u ^ kHashBytes;  // no key, one lane
        for (int64_t at = 0; at < size; at += kPartBytes) {
            // The first part begins with the parent, so all others begin that many bytes earlier in the content.
            const int64_t from = at ? at - kHashBytes : 0, before = at ? 0 : kHashBytes, room = kPartBytes - before;
            const int64_t rest = block_bytes - from < room ? block_bytes - from : room;
            std::memset(part, 0, sizeof(part));
            if (before) std::memcpy(part, parent, kHashBytes);
            std::memcpy(reinterpret_cast<uint8_t*>(part) + before, content + from, rest);
            const bool last = at + kPartBytes >= size;
            take(hash, part, last ? size : at + kPartBytes, last);
        }
        std::memcpy(hashes, hash, kHashBytes);
        parent = hashes;
    }
}
