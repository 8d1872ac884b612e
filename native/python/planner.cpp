// hyper_mpmd._native.planner: lowering and scheduling. Arrays come in and go out as plain bytes; Python views them as
// records (hyper_mpmd/scheduler/records.py).
#include "hyper_mpmd/planner.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <optional>

#include "planner.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hyper_mpmd {

namespace {

namespace pl = planner;

using Table = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Costs = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using SpaceCounts = std::vector<std::pair<int64_t, Table>>;
using Given = std::vector<std::tuple<int64_t, int64_t, int64_t>>;

template <class Row>
std::vector<Row> rows_of(const Table& table) {
  if (table.shape(1) * sizeof(int64_t) != sizeof(Row)) {
    throw pl::BadProgram("a table has " + std::to_string(table.shape(1)) + " columns where the native code has " +
                         std::to_string(sizeof(Row) / sizeof(int64_t)));
  }
  std::vector<Row> rows(table.shape(0));
  if (!rows.empty()) std::memcpy(rows.data(), table.data(), rows.size() * sizeof(Row));
  return rows;
}

// Hand a vector to numpy, which then owns it.
template <class Item, class As = uint8_t>
nb::object to_numpy(std::vector<Item>&& items) {
  auto* kept = new std::vector<Item>(std::move(items));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<Item>*>(p); });
  const size_t length = kept->size() * sizeof(Item) / sizeof(As);
  return nb::ndarray<nb::numpy, As, nb::ndim<1>>(reinterpret_cast<As*>(kept->data()), {length}, owner).cast();
}

nb::dict to_python(pl::Plan&& plan) {
  nb::dict sections;
  sections["ops"] = to_numpy(std::move(plan.ops));
  sections["tensors"] = to_numpy(std::move(plan.tensors));
  sections["tasks"] = to_numpy(std::move(plan.tasks));
  sections["accesses"] = to_numpy(std::move(plan.accesses));
  sections["waits"] = to_numpy(std::move(plan.waits));
  sections["signals"] = to_numpy(std::move(plan.signals));
  sections["events"] = to_numpy(std::move(plan.events));
  sections["queues"] = to_numpy(std::move(plan.queues));
  sections["launches"] = to_numpy(std::move(plan.launches));
  sections["dependencies"] = to_numpy(std::move(plan.dependencies));
  sections["peers"] = to_numpy(std::move(plan.peers));
  return sections;
}

nb::tuple to_python(pl::Program&& program, const std::vector<pl::TileSize>& tiles) {
  nb::dict sections;
  sections["ops"] = to_numpy(std::move(program.ops));
  sections["tensors"] = to_numpy(std::move(program.tensors));
  sections["tasks"] = to_numpy(std::move(program.tasks));
  sections["accesses"] = to_numpy(std::move(program.accesses));
  sections["waits"] = to_numpy(std::move(program.waits));
  sections["signals"] = to_numpy(std::move(program.signals));
  sections["events"] = to_numpy(std::move(program.events));
  sections["peers"] = to_numpy(std::move(program.peers));
  return nb::make_tuple(sections, to_numpy<int64_t, int64_t>(std::move(program.costs)), program.local_events,
                        to_numpy<pl::TileSize, int64_t>(std::vector(tiles)));
}

pl::Descriptor make_descriptor(int64_t ranks, const Table& spaces, const Table& tensors, const Table& ops,
                               const Table& operands, std::vector<std::string> space_names,
                               std::vector<std::string> tensor_names, std::vector<std::string> op_names) {
  return {ranks,
          rows_of<pl::SpaceRow>(spaces),
          rows_of<pl::TensorRow>(tensors),
          rows_of<pl::OpRow>(ops),
          rows_of<pl::OperandRow>(operands),
          std::move(space_names),
          std::move(tensor_names),
          std::move(op_names)};
}

pl::Device make_device(const std::array<int64_t, 3>& cores, const std::array<int64_t, 8>& cube_and_vector,
                       const std::array<int64_t, 4>& bytes, const std::array<int64_t, 4>& times,
                       std::vector<int64_t> row_tiles, std::vector<int64_t> col_tiles) {
  pl::Device d{};
  d.aic = cores[0];
  d.aiv = cores[1];
  d.unified = cores[2] != 0;
  for (int i = 0; i < 2; ++i) {
    d.cube_flops[i] = cube_and_vector[i];
    d.vector_flops[i] = cube_and_vector[2 + i];
    d.cube_ramp[i] = cube_and_vector[4 + i];
    d.vector_ramp[i] = cube_and_vector[6 + i];
  }
  d.cube_bytes = bytes[0];
  d.vector_bytes = bytes[1];
  d.link_bytes = bytes[2];
  d.row_bytes = bytes[3];
  d.task_ns = times[0];
  d.event_ns = times[1];
  d.remote_ns = times[2];
  d.launch_ns = times[3];
  d.row_tiles = std::move(row_tiles);
  d.col_tiles = std::move(col_tiles);
  return d;
}

pl::Policy policy_of(const std::string& name) {
  if (name == "O0") return pl::Policy::kO0;
  if (name == "O1") return pl::Policy::kO1;
  throw pl::BadProgram("no policy is called '" + name + "'");
}

// What all ranks of one call share.
struct Shared {
  pl::Layout layout;
  std::vector<pl::TileSize> tiles;
  pl::Landings landings;

  Shared(const pl::Descriptor& descriptor, std::span<const pl::SpaceLoads> loads, const pl::Device& device,
         std::span<const pl::GivenTile> given)
      : layout(descriptor, loads),
        tiles(pl::choose_tiles(descriptor, layout, device, given)),
        landings(descriptor, layout, tiles) {}
};

std::vector<pl::SpaceLoads> loads_of(const pl::Descriptor& descriptor, const SpaceCounts& counts) {
  std::vector<pl::SpaceLoads> loads;
  for (const auto& [space, table] : counts) {
    const bool known = space >= 0 && static_cast<size_t>(space) < descriptor.spaces.size();
    if (!known || static_cast<int64_t>(table.shape(0)) != descriptor.ranks ||
        static_cast<int64_t>(table.shape(1)) != descriptor.spaces[space].groups) {
      throw pl::BadProgram("loads of row space number " + std::to_string(space) + " do not fit the graph");
    }
    loads.push_back({space, table.data()});
  }
  return loads;
}

std::vector<pl::GivenTile> given_of(const Given& given) {
  std::vector<pl::GivenTile> tiles;
  for (const auto& [op, rows, cols] : given) tiles.push_back({op, rows, cols});
  return tiles;
}

void check_ranks(const pl::Descriptor& descriptor, const std::vector<int64_t>& ranks) {
  for (int64_t rank : ranks) {
    if (rank < 0 || rank >= descriptor.ranks) throw pl::BadProgram("no rank " + std::to_string(rank));
  }
}

nb::list lower(const pl::Descriptor& descriptor, const SpaceCounts& counts, const pl::Device& device,
               const std::vector<int64_t>& ranks, const Given& given) {
  auto loads = loads_of(descriptor, counts);
  auto tiles = given_of(given);
  check_ranks(descriptor, ranks);
  std::vector<pl::Program> programs;
  std::optional<Shared> shared;
  {
    nb::gil_scoped_release unlocked;
    shared.emplace(descriptor, loads, device, tiles);
    for (int64_t rank : ranks) {
      programs.push_back(pl::lower(descriptor, shared->layout, shared->landings, device, shared->tiles, rank));
    }
  }
  nb::list found;
  for (pl::Program& program : programs) found.append(to_python(std::move(program), shared->tiles));
  return found;
}

nb::tuple plan(const pl::Descriptor& descriptor, const SpaceCounts& counts, const pl::Device& device,
               const std::string& policy, const std::vector<int64_t>& ranks, const Given& given) {
  auto loads = loads_of(descriptor, counts);
  auto tiles = given_of(given);
  const pl::Policy chosen = policy_of(policy);
  check_ranks(descriptor, ranks);
  std::vector<pl::Plan> plans;
  std::optional<Shared> shared;
  {
    nb::gil_scoped_release unlocked;
    shared.emplace(descriptor, loads, device, tiles);
    for (int64_t rank : ranks) {
      const pl::Program program = pl::lower(descriptor, shared->layout, shared->landings, device, shared->tiles, rank);
      plans.push_back(pl::assemble(pl::view(program), device, chosen));
    }
  }
  nb::list found;
  for (pl::Plan& one : plans) found.append(to_python(std::move(one)));
  return nb::make_tuple(found, to_numpy<pl::TileSize, int64_t>(std::move(shared->tiles)));
}

template <class Record>
std::span<const Record> records_of(const Bytes& bytes) {
  return {reinterpret_cast<const Record*>(bytes.data()), bytes.shape(0) / sizeof(Record)};
}

nb::dict schedule(int64_t rank, int64_t ranks, int64_t local_events, const std::vector<Bytes>& records,
                  const Costs& costs, const pl::Device& device, const std::string& policy) {
  if (records.size() != 8) throw pl::BadProgram("a program has 8 sections");
  const pl::ProgramView program{rank,
                                ranks,
                                local_events,
                                records_of<OpRecord>(records[0]),
                                records_of<TensorRecord>(records[1]),
                                records_of<TaskRecord>(records[2]),
                                records_of<AccessRecord>(records[3]),
                                records_of<WaitRecord>(records[4]),
                                records_of<SignalRecord>(records[5]),
                                records_of<EventRecord>(records[6]),
                                records_of<PeerRecord>(records[7]),
                                {costs.data(), costs.shape(0)}};
  const pl::Policy chosen = policy_of(policy);
  pl::Plan plan;
  {
    nb::gil_scoped_release unlocked;
    pl::check(program);
    plan = pl::assemble(program, device, chosen);
  }
  return to_python(std::move(plan));
}

#define FIELD(Record, name) fields.append(nb::make_tuple(#name, offsetof(Record, name), sizeof(Record::name)))

// Every field of every record with its offset and size, for the test that compares them with the numpy dtypes.
nb::dict record_layouts() {
  nb::dict layouts;
  auto add = [&](const char* name, size_t size, nb::list fields) { layouts[name] = nb::make_tuple(size, fields); };
  {
    nb::list fields;
    FIELD(TaskRecord, op), FIELD(TaskRecord, number), FIELD(TaskRecord, group), FIELD(TaskRecord, peer);
    FIELD(TaskRecord, launch), FIELD(TaskRecord, access_begin), FIELD(TaskRecord, access_count);
    FIELD(TaskRecord, wait_begin), FIELD(TaskRecord, wait_count), FIELD(TaskRecord, signal_begin);
    FIELD(TaskRecord, signal_count), FIELD(TaskRecord, cost_ns), FIELD(TaskRecord, start_ns);
    FIELD(TaskRecord, end_ns);
    add("tasks", sizeof(TaskRecord), fields);
  }
  {
    nb::list fields;
    FIELD(AccessRecord, tensor), FIELD(AccessRecord, rank), FIELD(AccessRecord, row), FIELD(AccessRecord, rows);
    FIELD(AccessRecord, col), FIELD(AccessRecord, cols);
    add("accesses", sizeof(AccessRecord), fields);
  }
  {
    nb::list fields;
    FIELD(WaitRecord, event), FIELD(WaitRecord, threshold);
    add("waits", sizeof(WaitRecord), fields);
  }
  {
    nb::list fields;
    FIELD(SignalRecord, rank), FIELD(SignalRecord, event);
    add("signals", sizeof(SignalRecord), fields);
  }
  {
    nb::list fields;
    FIELD(EventRecord, threshold), FIELD(EventRecord, signaller), FIELD(EventRecord, slot), FIELD(EventRecord, op);
    FIELD(EventRecord, order), FIELD(EventRecord, tensor), FIELD(EventRecord, row), FIELD(EventRecord, rows);
    FIELD(EventRecord, col), FIELD(EventRecord, cols);
    add("events", sizeof(EventRecord), fields);
  }
  {
    nb::list fields;
    FIELD(QueueRecord, kind), FIELD(QueueRecord, core), FIELD(QueueRecord, begin), FIELD(QueueRecord, count);
    add("queues", sizeof(QueueRecord), fields);
  }
  {
    nb::list fields;
    FIELD(LaunchRecord, op), FIELD(LaunchRecord, task_count), FIELD(LaunchRecord, dependency_begin);
    FIELD(LaunchRecord, dependency_count), FIELD(LaunchRecord, start_ns), FIELD(LaunchRecord, end_ns);
    add("launches", sizeof(LaunchRecord), fields);
  }
  {
    nb::list fields;
    FIELD(OpRecord, kernel), FIELD(OpRecord, kind), FIELD(OpRecord, dtype), FIELD(OpRecord, read_count);
    FIELD(OpRecord, hop), FIELD(OpRecord, route);
    add("ops", sizeof(OpRecord), fields);
  }
  {
    nb::list fields;
    FIELD(TensorRecord, dtype), FIELD(TensorRecord, role), FIELD(TensorRecord, storage);
    FIELD(TensorRecord, reserved), FIELD(TensorRecord, rows), FIELD(TensorRecord, cols), FIELD(TensorRecord, offset);
    add("tensors", sizeof(TensorRecord), fields);
  }
  {
    nb::list fields;
    FIELD(PeerRecord, credit_slot), FIELD(PeerRecord, heap_words);
    add("peers", sizeof(PeerRecord), fields);
  }
  return layouts;
}

#undef FIELD

nb::dict constants() {
  nb::dict found;
  found["PLAN_VERSION"] = kPlanVersion;
  found["NONE"] = kNone;
  found["MAX_INDEX"] = kMaxIndex;
  found["MAX_THRESHOLD"] = kMaxThreshold;
  found["MAX_RANKS"] = kMaxRanks;
  found["MAX_WORK"] = kMaxWork;
  found["MAX_TIME"] = kMaxTime;
  found["MAX_BYTES"] = kMaxBytes;
  found["ALIGNMENT"] = kAlignment;
  found["WORDS_PER_LINE"] = kWordsPerLine;
  found["AIC"] = static_cast<uint32_t>(CoreKind::kAic);
  found["AIV"] = static_cast<uint32_t>(CoreKind::kAiv);
  found["BOTH"] = static_cast<uint32_t>(CoreKind::kBoth);
  found["ROW_UNIT"] = pl::kRowUnit;
  found["COL_UNIT"] = pl::kColUnit;
  nb::dict kernels;
  kernels["nop"] = static_cast<uint32_t>(Kernel::kNop);
  kernels["python"] = static_cast<uint32_t>(Kernel::kPython);
  kernels["copy"] = static_cast<uint32_t>(Kernel::kCopy);
  kernels["permute"] = static_cast<uint32_t>(Kernel::kPermute);
  kernels["gemm"] = static_cast<uint32_t>(Kernel::kGemm);
  kernels["swiglu"] = static_cast<uint32_t>(Kernel::kSwiGLU);
  kernels["unpermute"] = static_cast<uint32_t>(Kernel::kUnpermute);
  found["KERNELS"] = kernels;
  nb::dict roles;
  roles["input"] = static_cast<uint32_t>(Role::kInput);
  roles["output"] = static_cast<uint32_t>(Role::kOutput);
  roles["workspace"] = static_cast<uint32_t>(Role::kWorkspace);
  roles["symmetric"] = static_cast<uint32_t>(Role::kSymmetric);
  found["ROLES"] = roles;
  return found;
}

nb::dict table_columns() {
  nb::dict columns;
  columns["spaces"] = pl::SpaceRow::kColumns;
  columns["tensors"] = pl::TensorRow::kColumns;
  columns["ops"] = pl::OpRow::kColumns;
  columns["operands"] = pl::OperandRow::kColumns;
  return columns;
}

void raise_as(const char* name, const char* message) {
  nb::object error = nb::module_::import_("hyper_mpmd.errors").attr(name);
  PyErr_SetString(error.ptr(), message);
}

void translate(const std::exception_ptr& pending, void*) {
  try {
    std::rethrow_exception(pending);
  } catch (const pl::PlanLimit& e) {
    raise_as("PlanLimitError", e.what());
  } catch (const pl::Cycle& e) {
    raise_as("CycleError", e.what());
  } catch (const pl::BadProgram& e) {
    raise_as("PlanFormatError", e.what());
  }
}

}  // namespace

void bind_planner(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("planner", "Lowering and scheduling; see hyper_mpmd.scheduler.backend.");
  nb::register_exception_translator(translate);
  nb::class_<pl::Descriptor>(m, "Descriptor")
      .def("__init__", [](pl::Descriptor* self, int64_t ranks, Table spaces, Table tensors, Table ops, Table operands,
                          std::vector<std::string> space_names, std::vector<std::string> tensor_names,
                          std::vector<std::string> op_names) {
        new (self) pl::Descriptor(make_descriptor(ranks, spaces, tensors, ops, operands, std::move(space_names),
                                                  std::move(tensor_names), std::move(op_names)));
      });
  nb::class_<pl::Device>(m, "Device")
      .def("__init__", [](pl::Device* self, const std::array<int64_t, 3>& cores, const std::array<int64_t, 8>& rates,
                          const std::array<int64_t, 4>& bytes, const std::array<int64_t, 4>& times,
                          std::vector<int64_t> row_tiles, std::vector<int64_t> col_tiles) {
        new (self) pl::Device(make_device(cores, rates, bytes, times, std::move(row_tiles), std::move(col_tiles)));
      });
  m.def("lower", &lower, "descriptor"_a, "loads"_a, "device"_a, "ranks"_a, "given"_a);
  m.def("plan", &plan, "descriptor"_a, "loads"_a, "device"_a, "policy"_a, "ranks"_a, "given"_a);
  m.def("schedule", &schedule, "rank"_a, "ranks"_a, "local_events"_a, "records"_a, "costs"_a, "device"_a, "policy"_a);
  m.def("record_layouts", &record_layouts);
  m.def("constants", &constants);
  m.def("table_columns", &table_columns);
}

}  // namespace hyper_mpmd
