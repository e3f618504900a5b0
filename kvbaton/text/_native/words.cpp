// Words that follow a space and the tokens they become, looked up at the pace of memory; and token ids as JSON.
//
// A plain C library, loaded by words_native.py, which holds Python's lock through each call: nothing here is called by
// two threads at once. What a word is, and that a text may be cut between words, is said in words.py.
//
// Two generations of words: when the young one is full it becomes the old one, and what is still met moves back. A word
// that finds its neighbourhood of slots taken is not kept, so no choice of words makes a lookup long.

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr int kProbes = 16;

inline uint64_t mixed(uint64_t hash) {
    hash ^= hash >> 32;
    hash *= 0xd6e8feb86659fd93u;
    hash ^= hash >> 32;
    hash *= 0xd6e8feb86659fd93u;
    return hash ^ (hash >> 32);
}

struct Slot {
    uint64_t hash = 0;
    uint32_t word_at = 0, ids_at = 0;
    uint16_t word_length = 0, num_ids = 0;  // a length of 0: empty
};

class Generation {
public:
    explicit Generation(int64_t max_words) : max_words_(max_words) {
        uint64_t size = 64;
        while (size < 2 * static_cast<uint64_t>(max_words)) size *= 2;
        slots_.resize(size + kProbes);
        mask_ = size - 1;
    }

    const Slot* find(uint64_t hash, const char* word, int64_t length) const {
        for (const Slot *slot = &slots_[hash & mask_], *end = slot + kProbes; slot != end && slot->word_length; ++slot)
            if (slot->hash == hash && slot->word_length == length &&
                std::memcmp(words_.data() + slot->word_at, word, length) == 0)
                return slot;
        return nullptr;
    }

    const int32_t* ids(const Slot& slot) const { return ids_.data() + slot.ids_at; }

    void keep(uint64_t hash, const char* word, int64_t length, const int32_t* ids, int64_t num_ids) {
        for (Slot *slot = &slots_[hash & mask_], *end = slot + kProbes; slot != end; ++slot) {
            if (slot->word_length) continue;
            *slot = {hash, static_cast<uint32_t>(words_.size()), static_cast<uint32_t>(ids_.size()),
                     static_cast<uint16_t>(length), static_cast<uint16_t>(num_ids)};
            words_.append(word, length);
            ids_.insert(ids_.end(), ids, ids + num_ids);
            ++num_words_;
            return;
        }
    }

    bool full() const { return num_words_ >= max_words_; }

private:
    int64_t max_words_, num_words_ = 0;
    uint64_t mask_ = 0;
    std::vector<Slot> slots_;
    std::string words_;
    std::vector<int32_t> ids_;
};

struct Memory {
    uint64_t seed;
    int64_t max_words;
    Generation young, old;

    void keep(uint64_t hash, const char* word, int64_t length, const int32_t* ids, int64_t num_ids) {
        if (young.full()) {
            old = std::move(young);
            young = Generation(max_words);
        }
        young.keep(hash, word, length, ids, num_ids);
    }
};

// Where the word at ``start`` ends, and its hash: eight bytes at a time, of little-endian machines.
inline int64_t end_of_word(const char* text, int64_t start, int64_t length, uint64_t& hash) {
    constexpr uint64_t ones = 0x0101010101010101u, spaces = ones * ' ';
    for (int64_t at = start;; at += 8) {
        uint64_t part = spaces;
        std::memcpy(&part, text + at, length - at >= 8 ? 8 : length - at);
        const uint64_t other = part ^ spaces, zero = (other - ones) & ~other & (ones << 7);  // where a space is
        const int size = zero ? __builtin_ctzll(zero) / 8 : 8;  // the lowest is right, whatever those above it say
        if (size < 8) part &= (uint64_t{1} << (8 * size)) - 1;
        hash = (hash ^ part) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
        if (size < 8) {
            hash = mixed(hash);
            return at + size;
        }
    }
}

// Whether what follows may belong to the same piece: ASCII that Python calls space, and any of the rest, to be safe.
inline bool may_be_space(char byte) {
    return (byte >= '\t' && byte <= '\r') || (byte >= 0x1c && byte <= ' ') || static_cast<uint8_t>(byte) >= 0x80;
}

}  // namespace

extern "C" {

void* kvb_words_create(uint64_t seed, int64_t max_words) {
    return new Memory{seed, max_words, Generation(max_words), Generation(1)};
}

void kvb_words_destroy(void* memory) { delete static_cast<Memory*>(memory); }

// A word without the space before it. The caller sees to it that it is new, short, and has no more ids than bytes + 1.
void kvb_words_learn(void* memory, const char* word, int64_t length, const int32_t* ids, int64_t num_ids) {
    auto& words = *static_cast<Memory*>(memory);
    uint64_t hash = words.seed;
    if (length && num_ids && end_of_word(word, 0, length, hash) == length && !words.young.find(hash, word, length)) words.keep(hash, word, length, ids, num_ids);
}

// Ids of the known words of text[at:], into ``ids``, and where unknown text is: (start, end, ids before it) of each gap.
// Stops where the text ends, or at a space once ``most`` bytes were read or ``gaps`` is full. Returns where, and leaves
// the numbers of ids and gaps in ``counts``. ``ids`` has room for as many as bytes can be read: most + the longest word.
int64_t kvb_words_encode(void* memory, const char* text, int64_t at, int64_t length, int64_t most, int32_t* ids,
                         int64_t* gaps, int64_t max_gaps, int64_t* counts) {
    auto& words = *static_cast<Memory*>(memory);
    const int64_t enough = at + most;
    int64_t num_ids = 0, num_gaps = 0, gap = -1;
    bool joined = false, first = at == 0;  // the first word of a text follows no space, and so is never known
    while (at < length) {
        if (gap < 0 && at >= enough) break;
        const int64_t start = first ? at : at + 1;
        uint64_t hash = words.seed;
        const int64_t end = end_of_word(text, start, length, hash), size = end - start;
        if (!first && !joined && size) {
            const Generation* from = &words.young;
            const Slot* slot = from->find(hash, text + start, size);
            if (!slot && (slot = (from = &words.old)->find(hash, text + start, size))) {
                const Slot found = *slot;
                const std::vector<int32_t> kept(from->ids(found), from->ids(found) + found.num_ids);
                words.keep(hash, text + start, size, kept.data(), found.num_ids);
                slot = (from = &words.young)->find(hash, text + start, size);
            }
            if (slot) {
                if (gap >= 0) {
                    gaps[3 * num_gaps] = gap, gaps[3 * num_gaps + 1] = at, gaps[3 * num_gaps + 2] = num_ids;
                    ++num_gaps, gap = -1;
                }
                const int32_t* known = from->ids(*slot);
                ids[num_ids] = known[0];  // nearly always the only one
                for (int i = 1; i < slot->num_ids; ++i) ids[num_ids + i] = known[i];
                num_ids += slot->num_ids;
                at = end;
                continue;
            }
        }
        if (gap < 0) {
            if (num_gaps == max_gaps) break;
            gap = at;
        }
        first = false;
        joined = size == 0 || may_be_space(text[end - 1]);
        at = end;
    }
    if (gap >= 0) {
        gaps[3 * num_gaps] = gap, gaps[3 * num_gaps + 1] = at, gaps[3 * num_gaps + 2] = num_ids;
        ++num_gaps;
    }
    counts[0] = num_ids, counts[1] = num_gaps;
    return at;
}

// "[1,2,3]" into ``text``, which has room for 11 bytes an id and 2 more. Returns the length.
int64_t kvb_ids_as_json(const uint32_t* ids, int64_t num_ids, char* text) {
    char* to = text;
    *to++ = '[';
    for (int64_t i = 0; i < num_ids; ++i) {
        if (i) *to++ = ',';
        char digits[10];
        int size = 0;
        uint32_t id = ids[i];
        do digits[size++] = static_cast<char>('0' + id % 10);
        while (id /= 10);
        while (size) *to++ = digits[--size];
    }
    *to++ = ']';
    return to - text;
}

}  // extern "C"
