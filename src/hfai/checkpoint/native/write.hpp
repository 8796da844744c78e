// Memory written to a file, hashed while it is in the cache.
#pragma once

#include <string>

#include "calls.hpp"
#include "choice.hpp"
#include "hash.hpp"
#include "huge.hpp"

namespace checkpoint {

constexpr size_t kWritePiece = 1 << 20;   // of one call
constexpr size_t kCopyPiece = 64 << 10;   // to a mapping
// What is tried of huge pages: two of them, wherever it begins.
constexpr int64_t kTrial = 3 * HugePages::kSize;
constexpr size_t kEarly = 4 << 20;        // written, before the disk is told to begin
constexpr uintptr_t kDirectUnit = 4096;   // what direct I/O asks of places and lengths, at most

struct View {
  const char *data;
  size_t size;
};

class Writer {
 public:
  // `early`: the disk begins with each part as soon as it is written, in place of at the flush.
  // `direct`: a descriptor of the same file that goes past the page cache, or -1.
  // `in_memory`: the file is on tmpfs; the descriptor is for reading too.
  Writer(int descriptor, int direct, bool early, bool in_memory)
      : descriptor_(descriptor), direct_(direct), early_(early), in_memory_(in_memory) {}

  // Writes views back to back and appends the hash of each; returns 0 or an errno.
  int write(const std::vector<View> &views, int64_t offset, std::string &hashes) {
    if (in_memory_) return write_in_memory(views, offset, hashes);
    const size_t body = direct_ < 0 ? 0 : direct_size(views, offset);
    if (!body) return write_cached(views, offset, hashes);
    for (const View &view : views) {
      hash_.reset();
      hash_.update(view.data, view.size);
      add(hashes);
    }
    size_t total = 0;
    for (const View &view : views) total += view.size;
    char *data = const_cast<char *>(views.front().data);
    iovec direct{data, body};
    int code = write_all(direct_, &direct, 1, offset);
    if (code == EINVAL || code == EFAULT || code == EOPNOTSUPP || code == ENOTBLK) {
      // This memory or this file system cannot, whatever open() said.
      iovec again{data, body};
      code = write_all(descriptor_, &again, 1, offset);
      begin(offset, body);
    }
    if (code || body == total) return code;
    iovec rest{data + body, total - body};
    return write_all(descriptor_, &rest, 1, offset + static_cast<int64_t>(body));
  }

 private:
  // The bytes that can go past the page cache: none unless the views are one piece of memory.
  static size_t direct_size(const std::vector<View> &views, int64_t offset) {
    if (views.empty() || offset % kDirectUnit ||
        reinterpret_cast<uintptr_t>(views.front().data) % kDirectUnit)
      return 0;
    size_t total = 0;
    for (const View &view : views) {
      if (view.data != views.front().data + total) return 0;
      total += view.size;
    }
    return total / kDirectUnit * kDirectUnit;
  }

  int write_in_memory(const std::vector<View> &views, int64_t offset, std::string &hashes) {
    int64_t end = offset;
    for (const View &view : views) end += static_cast<int64_t>(view.size);
    if (end - offset < kTrial) return write_cached(views, offset, hashes);
    bool trial = false;
    const Choice::Way way = choice.next(trial);
    const Stopwatch watch;
    if (way == Choice::kHuge) {
      HugePages pages(descriptor_, offset, trial ? std::min(end, offset + kTrial) : end);
      const size_t size = static_cast<size_t>(pages.end() - pages.begin());
      if (size) return write_mapped(views, offset, hashes, pages, watch);
      choice.cannot(way);
    }
    const int code = write_cached(views, offset, hashes);
    choice.took(Choice::kSmall, watch.seconds(), static_cast<size_t>(end - offset));
    return code;
  }

  int write_mapped(const std::vector<View> &views, int64_t offset, std::string &hashes,
                   HugePages &pages, const Stopwatch &watch) {
    double beside = 0;  // seconds for what is not mapped
    at_boundary();
    for (const View &view : views) {
      hash_.reset();
      for (size_t at = 0; at < view.size;) {
        const bool mapped = pages.begin() <= offset && offset < pages.end();
        size_t piece = std::min(view.size - at, mapped ? kCopyPiece : kWritePiece);
        for (const int64_t border : {pages.begin(), pages.end()})
          if (offset < border) piece = std::min(piece, static_cast<size_t>(border - offset));
        if (mapped) {
          hash_.update(view.data + at, piece);
          pages.write(offset, view.data + at, piece);
        } else {
          const Stopwatch part;
          hash_.update(view.data + at, piece);
          iovec rest{const_cast<char *>(view.data) + at, piece};
          if (const int code = write_all(descriptor_, &rest, 1, offset)) return code;
          beside += part.seconds();
        }
        at += piece;
        offset += static_cast<int64_t>(piece);
      }
      add(hashes);
    }
    at_boundary();
    choice.took(Choice::kHuge, watch.seconds() - beside,
                static_cast<size_t>(pages.end() - pages.begin()));
    return 0;
  }

  int write_cached(const std::vector<View> &views, int64_t offset, std::string &hashes) {
    std::vector<iovec> batch;
    size_t size = 0, since = 0;
    int64_t begun = offset;
    const auto flush = [&] {
      const int code = write_all(descriptor_, batch.data(), batch.size(), offset);
      offset += static_cast<int64_t>(size);
      since += size;
      batch.clear();
      size = 0;
      if (code || since < kEarly) return code;
      begin(begun, since);
      begun = offset;
      since = 0;
      return 0;
    };
    for (const View &view : views) {
      hash_.reset();
      for (size_t at = 0; at < view.size;) {
        const size_t piece = std::min(view.size - at, kWritePiece - size);
        hash_.update(view.data + at, piece);
        batch.push_back({const_cast<char *>(view.data) + at, piece});
        size += piece;
        at += piece;
        if (size < kWritePiece && batch.size() < kMostViews) continue;
        if (const int code = flush()) return code;
      }
      add(hashes);
    }
    const int code = size ? flush() : 0;
    if (!code && since) begin(begun, since);
    return code;
  }

  // What goes wrong here, the flush will say.
  void begin(int64_t offset, size_t size) {
    if (early_)
      sync_file_range(descriptor_, offset, static_cast<off64_t>(size), SYNC_FILE_RANGE_WRITE);
  }

  void add(std::string &hashes) {
    char digits[Hash::kDigits];
    hash_.digest(digits);
    hashes.append(digits, Hash::kDigits);
  }

  const int descriptor_, direct_;
  const bool early_, in_memory_;
  Hash hash_;
};

}  // namespace checkpoint
