// A stand-in for ProcessGroupNCCL: gloo moves the bytes, on the streams and under the rules of NCCL.
//
// - Tensors are contiguous, on a CUDA device, and of a dtype that NCCL knows.
// - The first call of a group, batched sends included, is made by all its ranks: it makes the communicator.
// - All ranks make the same collectives in the same order, with as many elements of the same dtype.
// - An asynchronous collective runs on a stream of the group; others wait for it by Work.wait().
#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <map>

#include "order.h"
#include "tensors.h"

namespace {

using Tensors = std::vector<at::Tensor>;
using c10d::OpType;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;
using emulated::Locked;

[[noreturn]] void broken(const std::string& rule) {
  emulated::report("nccl", rule);
  TORCH_CHECK(false, rule, " (emulated NCCL)");
}

bool is_known(at::ScalarType dtype) {
  switch (dtype) {
    case at::kChar: case at::kByte: case at::kBool: case at::kInt: case at::kLong: case at::kHalf: case at::kBFloat16:
    case at::kFloat: case at::kDouble: case at::kFloat8_e5m2: case at::kFloat8_e4m3fn:
      return true;
    default:
      return c10::isComplexType(dtype);
  }
}

void check(const Tensors& tensors) {
  for (auto& t : tensors) {
    if (!t.is_cuda()) broken("Tensors must be CUDA and dense: this one is on " + t.device().str());
    if (!t.is_contiguous(t.suggest_memory_format()) && !t.is_contiguous()) broken("Tensors must be contiguous");
    if (!is_known(t.scalar_type()))
      broken(std::string("Input tensor data type is not supported for NCCL process group: ") + toString(t.scalar_type()));
  }
}

Tensors aliases(const Tensors& tensors) {
  Tensors made;
  for (auto& t : tensors) made.push_back(emulated::cpu_alias(t));
  return made;
}

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

// Over at once for the host, as NCCL's; who waits for it lets the current stream wait for the group's.
struct Done final : c10d::Work {
  const int device;
  const emulated::Clock clock;
  Tensors held;  // their memory is kept until somebody waits
  c10::intrusive_ptr<c10::ivalue::Future> future;

  Done(int device, emulated::Clock clock, Tensors held, const Tensors& results, OpType type)
      : Work(-1, type), device(device), clock(std::move(clock)), held(std::move(held)) {
    future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(c10::List<at::Tensor>(results)));
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    Locked locked;
    emulated::join(emulated::stream(emulated::current_stream(device)).clock, clock);
    held.clear();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  Tensors result() override { return held; }
};

struct Options : c10d::Backend::Options {
  explicit Options(std::chrono::milliseconds timeout) : c10d::Backend::Options("nccl", timeout) {}
  bool is_high_priority_stream = false;
};

struct Group : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  c10::intrusive_ptr<Options> options;
  std::map<int, int> streams;  // of asynchronous collectives, by device
  uint64_t sequence = 0;
  bool has_communicator = false, is_coalescing = false;
  std::vector<WorkPointer> batch;  // of sends and receives
  Tensors sent, received;

  Group(c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<Options> options)
      : Backend(gloo->getRank(), gloo->getSize()), gloo(std::move(gloo)), options(std::move(options)) {}
  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options; }
  void setTimeout(std::chrono::milliseconds timeout) override { options->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence; }

  void make_communicator() {
    if (std::exchange(has_communicator, true)) return;
    try {
      c10d::BarrierOptions patience;
      patience.timeout = std::chrono::seconds(20);
      gloo->barrier(patience)->wait();
    } catch (const std::exception& error) {
      broken("the first NCCL call of a group must be made by all its ranks, and some have not come within 20 s");
    }
  }

  // Every rank is at the same collective, with as much of the same dtype.
  void compare(OpType type, const Tensors& first, bool may_differ_in_size) {
    const auto dtype = first.empty() ? 0 : static_cast<int64_t>(first[0].scalar_type());
    const auto size = first.empty() || may_differ_in_size ? 0 : first[0].numel();
    std::vector<int64_t> mine{static_cast<int64_t>(sequence), static_cast<int64_t>(type), dtype, size};
    auto own = at::tensor(mine, at::kLong);
    std::vector<Tensors> all(1);
    for (int rank = 0; rank < getSize(); ++rank) all[0].push_back(at::empty_like(own));
    Tensors input{own};
    gloo->allgather(all, input, c10d::AllgatherOptions())->wait();
    for (int rank = 0; rank < getSize(); ++rank) {
      if (all[0][rank].equal(own)) continue;
      const auto* its = all[0][rank].const_data_ptr<int64_t>();
      std::string rule = "all ranks must make the same collective: call " + std::to_string(sequence) + " is " + c10d::opTypeToString(type) +
                         " of " + std::to_string(size) + " " + toString(static_cast<at::ScalarType>(dtype)) + " on rank " +
                         std::to_string(getRank()) + ", and call " + std::to_string(its[0]) + " " +
                         c10d::opTypeToString(static_cast<OpType>(its[1])) + " of " + std::to_string(its[3]) + " " +
                         toString(static_cast<at::ScalarType>(its[2])) + " on rank " + std::to_string(rank);
      broken(rule);
    }
  }

  int stream_of(int device, bool is_async) {
    if (!is_async) return emulated::current_stream(device);
    auto [entry, is_new] = streams.try_emplace(device, 0);
    if (is_new) entry->second = emulated::stream_index(device, emulated::new_stream(device));
    return entry->second;
  }

  // `move`: what gloo does, over aliases on the CPU.
  template <typename Move>
  WorkPointer run(OpType type, const Tensors& reads, const Tensors& writes, bool is_async, Move move, bool is_collective = true,
                  bool may_differ_in_size = false) {
    Tensors all = reads;
    all.insert(all.end(), writes.begin(), writes.end());
    check(all);
    if (is_collective) {
      ++sequence;  // of sends and receives, ranks of a pipeline make different numbers
      make_communicator();
      compare(type, reads.empty() ? writes : reads, may_differ_in_size);
    }
    const emulated::Launched launched("nccl " + c10d::opTypeToString(type));
    const int device = all.empty() ? 0 : all[0].get_device();
    int s;
    {
      Locked locked;
      s = stream_of(device, is_async);
      if (is_async) {
        emulated::begin(emulated::current_stream(device));
        emulated::join(emulated::stream(s).clock, emulated::stream(emulated::current_stream(device)).clock);
      }
      const auto time = emulated::begin(s);
      const auto name = "nccl " + c10d::opTypeToString(type);
      for (auto& t : reads) emulated::touch(s, time, t, false, name);
      for (auto& t : writes) emulated::touch(s, time, t, true, name);
    }
    if (WorkPointer work = move()) work->wait();
    Locked locked;
    emulated::begin(s);
    return c10::make_intrusive<Done>(device, emulated::stream(s).clock, is_async ? all : writes, writes, type);
  }

  WorkPointer broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return run(OpType::BROADCAST, t, t, o.asyncOp, [&] { auto a = aliases(t); return gloo->broadcast(a, o); });
  }
  WorkPointer allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return run(OpType::ALLREDUCE, t, t, o.asyncOp, [&]() -> WorkPointer {
      auto a = aliases(t);
      if (o.reduceOp != c10d::ReduceOp::AVG || t.empty() || !c10::isIntegralType(t[0].scalar_type(), true)) return gloo->allreduce(a, o);
      auto sum = o;  // NCCL's average of integers is their sum, divided without a rest; gloo has none
      sum.reduceOp = c10d::ReduceOp::SUM;
      gloo->allreduce(a, sum)->wait();
      for (auto& each : a) each.div_(getSize(), "trunc");
      return {};
    });
  }
  WorkPointer reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    return run(OpType::REDUCE, t, t, o.asyncOp, [&] { auto a = aliases(t); return gloo->reduce(a, o); });
  }
  WorkPointer allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return run(OpType::ALLGATHER, in, flat(out), o.asyncOp, [&] {
      std::vector<Tensors> to;
      for (auto& list : out) to.push_back(aliases(list));
      auto from = aliases(in);
      return gloo->allgather(to, from, o);
    });
  }
  WorkPointer _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    return run(OpType::_ALLGATHER_BASE, {in}, {out}, o.asyncOp, [&] {
      // NCCL counts elements, gloo compares shapes; and they may be the same memory.
      auto to = emulated::cpu_alias(out).view(-1), from = emulated::cpu_alias(in).clone().view(-1);
      return gloo->_allgather_base(to, from, o);
    });
  }
  WorkPointer _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return run(OpType::_REDUCE_SCATTER_BASE, {in}, {out}, o.asyncOp, [&] {
      auto to = emulated::cpu_alias(out).view(-1), from = emulated::cpu_alias(in).view(-1);
      return gloo->_reduce_scatter_base(to, from, o);
    });
  }
  WorkPointer allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    WorkPointer last;
    for (size_t i = 0; i < out.size(); ++i) last = _allgather_base(out[i], in[i], o);
    return last;
  }
  WorkPointer reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    WorkPointer last;
    for (size_t i = 0; i < out.size(); ++i) last = _reduce_scatter_base(out[i], in[i], o);
    return last;
  }
  WorkPointer reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& o) override {
    return run(OpType::REDUCE_SCATTER, flat(in), out, o.asyncOp, [&] {
      std::vector<Tensors> from;
      for (auto& list : in) from.push_back(aliases(list));
      auto to = aliases(out);
      return gloo->reduce_scatter(to, from, o);
    });
  }
  WorkPointer alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                            const c10d::AllToAllOptions& o) override {
    auto move = [&] {
      auto to = emulated::cpu_alias(out), from = emulated::cpu_alias(in);
      return gloo->alltoall_base(to, from, out_sizes, in_sizes, o);
    };
    return run(OpType::ALLTOALL_BASE, {in}, {out}, o.asyncOp, move, true, true);
  }
  WorkPointer alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override {
    auto move = [&] {
      auto to = aliases(out), from = aliases(in);
      return gloo->alltoall(to, from, o);
    };
    return run(OpType::ALLTOALL, in, out, o.asyncOp, move, true, true);
  }
  WorkPointer gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& o) override {
    return run(OpType::GATHER, in, flat(out), o.asyncOp, [&] {
      std::vector<Tensors> to;
      for (auto& list : out) to.push_back(aliases(list));
      auto from = aliases(in);
      return gloo->gather(to, from, o);
    });
  }
  WorkPointer scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& o) override {
    auto move = [&] {
      std::vector<Tensors> from;
      for (auto& list : in) from.push_back(aliases(list));
      auto to = aliases(out);
      return gloo->scatter(to, from, o);
    };
    return run(OpType::SCATTER, flat(in), out, o.asyncOp, move, true, true);
  }
  WorkPointer barrier(const c10d::BarrierOptions& o) override {
    return run(OpType::BARRIER, {}, {}, false, [&] { return gloo->barrier(o); });
  }

  WorkPointer transfer(Tensors& tensors, bool is_send, int peer, int tag) {
    auto move = [&] {
      auto a = aliases(tensors);
      return is_send ? gloo->send(a, peer, tag) : gloo->recv(a, peer, tag);
    };
    if (is_coalescing) {
      check(tensors);
      batch.push_back(move());
      auto& list = is_send ? sent : received;
      list.insert(list.end(), tensors.begin(), tensors.end());
      return nullptr;
    }
    // Alone, it has a communicator of its two ranks.
    return run(is_send ? OpType::SEND : OpType::RECV, is_send ? tensors : Tensors(), is_send ? Tensors() : tensors, true, move, false);
  }
  WorkPointer send(Tensors& tensors, int to, int tag) override { return transfer(tensors, true, to, tag); }
  WorkPointer recv(Tensors& tensors, int from, int tag) override { return transfer(tensors, false, from, tag); }
  void startCoalescing() override {
    make_communicator();
    is_coalescing = true;
    batch.clear();
    sent.clear();
    received.clear();
  }
  WorkPointer endCoalescing() override {
    is_coalescing = false;
    auto move = [&]() -> WorkPointer {
      for (auto& work : std::exchange(batch, {})) work->wait();
      return nullptr;
    };
    return run(OpType::COALESCED, sent, received, true, move, false);
  }
};

}  // namespace

PYBIND11_MODULE(emulated_nccl, m) {
  py::module_::import("torch.distributed");
  auto backend = py::module_::import("torch._C._distributed_c10d").attr("Backend");
  py::class_<Options, c10::intrusive_ptr<Options>>(m, "Options", backend.attr("Options"))
      .def(py::init([](bool) { return c10::make_intrusive<Options>(std::chrono::minutes(10)); }), py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &Options::is_high_priority_stream);
  py::class_<Group, c10::intrusive_ptr<Group>>(m, "Group", backend)
      .def(py::init<c10::intrusive_ptr<c10d::Backend>, c10::intrusive_ptr<Options>>())
      .def_property_readonly("options", [](Group& self) { return self.options; })
      .def("abort", [](Group&) {})
      .def("shutdown", [](Group&) {})
      .def("_shutdown", [](Group&) {})
      .def("perform_nocolor_split", [](Group&, py::object) {})
      .def("_set_default_timeout", [](Group& self, std::chrono::milliseconds timeout) { self.options->timeout = timeout; });
}
