// Threads that share the work of one operation at a time.
//
// Work is cut into more pieces than there are threads, and whoever is free takes the next: a thread
// that the operating system has put aside for a neighbour holds up the piece it has, and no other.
// A thread without work looks for some for `spin` rounds and then sleeps in the kernel, so that a
// gateway on the same cores finds them free between steps. So does the caller when the last pieces
// are not done after PATIENCE rounds: whoever has them was put aside, and a core that a caller keeps
// busy with waiting is none that the system could move them to.
//
// `each_in_order` first gives every thread neighbouring pieces of its own, and what is left of one's
// goes to whoever has none.
//
// One caller at a time. Which piece is next, how many there are and of which job lie in one word, so
// that a thread that wakes late can never take a piece of a job it knows nothing of. In a forked
// child the threads are missing and the caller does all pieces itself; it must not end the pool.

#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

namespace polyhost {

class Pool {
 public:
  using Work = void (*)(void* context, int piece);

  // With fewer threads where the system gives no more.
  explicit Pool(int num_threads) {
    try {
      for (int i = 1; i < num_threads; i++) threads_.emplace_back([this] { live(); });
    } catch (const std::system_error&) {
    }
    shares_.reset(new Share[threads_.size() + 1]);
  }

  ~Pool() {
    ending_.store(true, std::memory_order_release);
    wake();
    for (auto& thread : threads_) thread.join();
  }

  int num_threads() const { return int(threads_.size()) + 1; }

  // How many rounds of looking before a thread sleeps; 0: at once.
  void set_spin(int rounds) { spin_.store(rounds, std::memory_order_relaxed); }

  // Calls f(piece) for every piece in [0, num_pieces), and returns when all have returned.
  template <class F>
  void each(int num_pieces, F& f) {
    if (num_pieces <= 1 || threads_.empty()) {
      for (int piece = 0; piece < num_pieces; piece++) f(piece);
      return;
    }
    for (int begin = 0; begin < num_pieces; begin += MAX_PIECES) {
      auto part = [&](int piece) { f(begin + piece); };
      share(std::min(MAX_PIECES, num_pieces - begin), part);
    }
  }

  // The same; each thread goes through neighbours one after another, so that what it asks memory for
  // ahead is its own, and helps the others from behind when it has no more.
  template <class F>
  void each_in_order(int num_pieces, F& f) {
    int num_shares = std::min(num_threads(), num_pieces);
    if (num_shares <= 1) {
      for (int piece = 0; piece < num_pieces; piece++) f(piece);
      return;
    }
    for (int i = 0; i < num_shares; i++)
      shares_[size_t(i)].set(int(int64_t(num_pieces) * i / num_shares),
                             int(int64_t(num_pieces) * (i + 1) / num_shares));
    auto go_through = [&](int mine) {
      int piece;
      while (shares_[size_t(mine)].take_first(&piece)) f(piece);
      for (int i = 1; i < num_shares; i++) {
        Share& other = shares_[size_t((mine + i) % num_shares)];
        while (other.take_last(&piece)) f(piece);
      }
    };
    each(num_shares, go_through);
  }

  // The most that one job's word has room for.
  static constexpr int MAX_PIECES = (1 << 20) - 1;

 private:
  // Pieces [first, end) in one word.
  class alignas(64) Share {
   public:
    void set(int first, int end) { range_.store(word(first, end), std::memory_order_relaxed); }
    bool take_first(int* piece) {
      return take([&](uint32_t first, uint32_t end) {
        *piece = int(first);
        return word(first + 1, end);
      });
    }
    bool take_last(int* piece) {
      return take([&](uint32_t first, uint32_t end) {
        *piece = int(end - 1);
        return word(first, end - 1);
      });
    }

   private:
    static uint64_t word(uint64_t first, uint64_t end) { return first << 32 | end; }

    template <class F>
    bool take(F rest) {
      uint64_t range = range_.load(std::memory_order_relaxed);
      for (;;) {
        uint32_t first = uint32_t(range >> 32), end = uint32_t(range);
        if (first >= end) return false;
        if (range_.compare_exchange_weak(range, rest(first, end), std::memory_order_relaxed))
          return true;
      }
    }

    std::atomic<uint64_t> range_{0};
  };

  static constexpr int COUNT_BITS = 20;
  static constexpr uint64_t COUNT_MASK = (1u << COUNT_BITS) - 1;
  static_assert(MAX_PIECES == int(COUNT_MASK));
  static constexpr uint64_t JOB_MASK = (uint64_t(1) << (64 - 2 * COUNT_BITS)) - 1;
  static constexpr int PATIENCE = 4000;

  static uint64_t pack(uint64_t job, uint64_t total, uint64_t next) {
    return job << (2 * COUNT_BITS) | total << COUNT_BITS | next;
  }

  static void pause() { __builtin_ia32_pause(); }

  template <class F>
  void share(int num_pieces, F& f) {
    work_ = [](void* context, int piece) { (*static_cast<F*>(context))(piece); };
    context_ = &f;
    left_.store(num_pieces, std::memory_order_relaxed);
    job_ = (job_ + 1) & JOB_MASK;
    state_.store(pack(job_, num_pieces, 0), std::memory_order_seq_cst);
    wake();
    take_all();
    wait_for_others();
  }

  void take_all() {
    uint64_t state = state_.load(std::memory_order_acquire);
    for (;;) {
      uint64_t next = state & COUNT_MASK, total = (state >> COUNT_BITS) & COUNT_MASK;
      if (next >= total) return;
      if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
      work_(context_, int(next));
      if (left_.fetch_sub(1, std::memory_order_seq_cst) == 1 &&
          waiting_.load(std::memory_order_seq_cst))
        syscall(SYS_futex, &left_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
      state = state_.load(std::memory_order_acquire);
    }
  }

  void wait_for_others() {
    for (int round = 0; round < PATIENCE; round++) {
      if (left_.load(std::memory_order_acquire) == 0) return;
      pause();
    }
    waiting_.store(true, std::memory_order_seq_cst);
    // The kernel looks again: a piece that ended in between makes it return at once.
    while (int left = left_.load(std::memory_order_seq_cst))
      syscall(SYS_futex, &left_, FUTEX_WAIT_PRIVATE, left, nullptr, nullptr, 0);
    waiting_.store(false, std::memory_order_relaxed);
  }

  // In one order with `sleepers_`: either the caller sees the sleeper or the sleeper the work.
  bool any_work() const {
    uint64_t state = state_.load(std::memory_order_seq_cst);
    return (state & COUNT_MASK) < ((state >> COUNT_BITS) & COUNT_MASK);
  }

  void live() {
    for (;;) {
      int rounds = spin_.load(std::memory_order_relaxed);
      bool found = false;
      for (int i = 0; i <= rounds && !found; i++) {
        if (ending_.load(std::memory_order_acquire)) return;
        found = any_work();
        if (!found) pause();
      }
      if (!found) {
        uint32_t seen = bell_.load(std::memory_order_acquire);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        if (!any_work() && !ending_.load(std::memory_order_acquire))
          syscall(SYS_futex, &bell_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        continue;
      }
      take_all();
    }
  }

  void wake() {
    if (sleepers_.load(std::memory_order_seq_cst) == 0 && !ending_.load()) return;
    bell_.fetch_add(1, std::memory_order_seq_cst);
    syscall(SYS_futex, &bell_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int> left_{0};
  std::atomic<bool> waiting_{false};
  alignas(64) std::atomic<uint32_t> bell_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<int> spin_{2000};
  std::atomic<bool> ending_{false};
  uint64_t job_ = 0;
  Work work_ = nullptr;
  void* context_ = nullptr;
  std::vector<std::thread> threads_;
  std::unique_ptr<Share[]> shares_;
};

}  // namespace polyhost
