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

#include "bind.h"

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

void make_descriptor(pl::Descriptor* self, int64_t ranks, const Table& spaces, const Table& tensors, const Table& ops,
                     const Table& operands, std::vector<std::string> space_names, std::vector<std::string> tensor_names,
                     std::vector<std::string> op_names) {
  new (self) pl::Descriptor{ranks,
                            rows_of<pl::SpaceRow>(spaces),
                            rows_of<pl::TensorRow>(tensors),
                            rows_of<pl::OpRow>(ops),
                            rows_of<pl::OperandRow>(operands),
                            std::move(space_names),
                            std::move(tensor_names),
                            std::move(op_names)};
}

// cores: AIC, AIV, unified; rates: float32 and bfloat16 of the cube, of the vector unit, then both ramps.
void make_device(pl::Device* self, const std::array<int64_t, 3>& cores, const std::array<int64_t, 8>& rates,
                 const std::array<int64_t, 7>& bytes, const std::array<int64_t, 4>& times,
                 std::vector<int64_t> row_tiles, std::vector<int64_t> col_tiles) {
  new (self) pl::Device{cores[0],
                        cores[1],
                        cores[2] != 0,
                        {rates[0], rates[1]},
                        {rates[2], rates[3]},
                        {rates[4], rates[5]},
                        {rates[6], rates[7]},
                        bytes[0],
                        bytes[1],
                        bytes[2],
                        bytes[3],
                        bytes[4],
                        bytes[5],
                        bytes[6],
                        times[0],
                        times[1],
                        times[2],
                        times[3],
                        std::move(row_tiles),
                        std::move(col_tiles)};
}

// how: 0 op by op, 1 list scheduling, 2 strided; parts: serial, whole groups, rotation, priorities, interleave,
// bursts.
void make_policy(pl::Policy* self, int how, const std::array<bool, 6>& parts) {
  if (how < 0 || how > 2) throw pl::BadProgram("no policy is numbered " + std::to_string(how));
  new (self) pl::Policy{static_cast<pl::Policy::How>(how), parts[0], parts[1], parts[2], parts[3], parts[4], parts[5]};
}

// What all ranks of one call share.
struct Shared {
  pl::Layout layout;
  std::vector<pl::TileSize> tiles;
  pl::Landings landings;

  Shared(const pl::Descriptor& descriptor, std::span<const pl::SpaceLoads> loads, const pl::Device& device,
         std::span<const pl::GivenTile> given, const pl::Policy& policy)
      : layout(descriptor, loads),
        tiles(pl::choose_tiles(descriptor, layout, device, given)),
        landings(descriptor, layout, tiles, policy) {}
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
               const pl::Policy& policy, const std::vector<int64_t>& ranks, const Given& given) {
  auto loads = loads_of(descriptor, counts);
  auto tiles = given_of(given);
  check_ranks(descriptor, ranks);
  std::vector<pl::Program> programs;
  std::optional<Shared> shared;
  {
    nb::gil_scoped_release unlocked;
    shared.emplace(descriptor, loads, device, tiles, policy);
    for (int64_t rank : ranks) {
      programs.push_back(pl::lower(descriptor, shared->layout, shared->landings, device, shared->tiles, policy, rank));
    }
  }
  nb::list found;
  for (pl::Program& program : programs) found.append(to_python(std::move(program), shared->tiles));
  return found;
}

nb::tuple plan(const pl::Descriptor& descriptor, const SpaceCounts& counts, const pl::Device& device,
               const pl::Policy& policy, const std::vector<int64_t>& ranks, const Given& given) {
  auto loads = loads_of(descriptor, counts);
  auto tiles = given_of(given);
  check_ranks(descriptor, ranks);
  std::vector<pl::Plan> plans;
  std::optional<Shared> shared;
  {
    nb::gil_scoped_release unlocked;
    shared.emplace(descriptor, loads, device, tiles, policy);
    for (int64_t rank : ranks) {
      const pl::Program program =
          pl::lower(descriptor, shared->layout, shared->landings, device, shared->tiles, policy, rank);
      plans.push_back(pl::assemble(pl::view(program), device, policy));
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
                  const Costs& costs, const pl::Device& device, const pl::Policy& policy) {
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
  pl::Plan plan;
  {
    nb::gil_scoped_release unlocked;
    pl::check(program);
    plan = pl::assemble(program, device, policy);
  }
  return to_python(std::move(plan));
}

int64_t longest_path(const Costs& weights, const Costs& sources, const Costs& targets, const Costs& latencies) {
  if (sources.shape(0) != targets.shape(0) || sources.shape(0) != latencies.shape(0)) {
    throw pl::BadProgram("edges need a source, a target and a latency each");
  }
  auto span = [](const Costs& a) { return std::span<const int64_t>(a.data(), a.shape(0)); };
  nb::gil_scoped_release unlocked;
  return pl::longest_path(span(weights), span(sources), span(targets), span(latencies));
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
  nb::class_<pl::Descriptor>(m, "Descriptor").def("__init__", &make_descriptor);
  nb::class_<pl::Device>(m, "Device").def("__init__", &make_device);
  nb::class_<pl::Policy>(m, "Policy").def("__init__", &make_policy);
  m.def("lower", &lower, "descriptor"_a, "loads"_a, "device"_a, "policy"_a, "ranks"_a, "given"_a);
  m.def("plan", &plan, "descriptor"_a, "loads"_a, "device"_a, "policy"_a, "ranks"_a, "given"_a);
  m.def("schedule", &schedule, "rank"_a, "ranks"_a, "local_events"_a, "records"_a, "costs"_a, "device"_a, "policy"_a);
  m.def("longest_path", &longest_path, "weights"_a, "sources"_a, "targets"_a, "latencies"_a);
  m.def("table_columns", &table_columns);
}

}  // namespace hyper_mpmd
