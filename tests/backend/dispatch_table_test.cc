// Which kernel runs for each operator on the mode key and on the trace device, against a
// committed table. A torch that adds an operator, or a change here that hides one, shows up.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/version.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "backend/mode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/backend/traced_loader.h"

namespace loadplan::testing {
namespace {

using ::testing::ElementsAre;

// Most operators: seen by the watcher, and no kernel of ours on the device.
constexpr char kDefault[] = "watcher fallback";

// The line of `key` in what the dispatcher prints about an operator; "" where there is none.
std::string LineOf(const std::string& printed, const std::string& key) {
  for (const auto line : absl::StrSplit(printed, '\n')) {
    if (line.substr(0, key.size() + 2) == key + ": ") return std::string(line);
  }
  return "";
}

bool Has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

std::string OnModeKey(const c10::OperatorHandle& op) {
  const std::string line = LineOf(op.dumpComputedTable(), c10::toString(kModeKey));
  if (!Has(line, "backend/register.cc")) return line.empty() ? "nothing" : "stock";
  if (Has(line, "[backend fallback]")) return "watcher";
  return Has(line, "fallthrough") ? "fallthrough" : "ours";
}

std::string OnDevice(const c10::OperatorHandle& op) {
  const std::string line = LineOf(op.dumpComputedTable(), "PrivateUse1");
  if (!Has(line, "backend/register.cc")) return line.empty() ? "nothing" : "stock";
  if (Has(line, "[backend fallback]")) return "fallback";
  // Registered by name: either one of our kernels, or the boxed fallback.
  return Has(LineOf(op.dumpState(), "PrivateUse1"), "unboxed") ? "ours" : "fallback";
}

using Table = std::map<std::string, std::string>;

Table MakeTable() {
  Table table;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!absl::StartsWith(name.name, "aten::")) continue;
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op || !op->hasSchema()) continue;
    table[c10::toString(name)] = absl::StrCat(OnModeKey(*op), " ", OnDevice(*op));
  }
  return table;
}

std::string TorchMinor() {
  return absl::StrCat("torch ", TORCH_VERSION_MAJOR, ".", TORCH_VERSION_MINOR);
}

std::filesystem::path TablePath() {
  return std::filesystem::path(LOADPLAN_SOURCE_DIR) / "tests/backend/dispatch_table.txt";
}

void Write(const Table& table) {
  std::ofstream file(TablePath());
  file << "# " << TorchMinor() << ": operator, kernel on the mode key, kernel on PrivateUse1.\n"
       << "# Operators that are not listed: " << kDefault << ". Made by this folder's test with\n"
       << "# LOADPLAN_UPDATE_TABLE=1.\n";
  for (const auto& [op, kernels] : table) {
    if (kernels != kDefault) file << op << " " << kernels << "\n";
  }
}

class DispatchTable : public ::testing::Test {
 protected:
  static const Table& table() {
    static const Table made = MakeTable();
    return made;
  }
};

TEST_F(DispatchTable, IsTheCommittedOne) {
  if (std::getenv("LOADPLAN_UPDATE_TABLE") != nullptr) Write(table());
  std::ifstream file(TablePath());
  std::string line;
  ASSERT_TRUE(std::getline(file, line)) << TablePath() << " cannot be read";
  if (!Has(line, (TorchMinor() + ":").c_str()))
    GTEST_SKIP() << "the table was made for another torch than " << TorchMinor() << ": " << line;
  Table committed;
  while (std::getline(file, line)) {
    if (line.empty() || line[0] == '#') continue;
    const auto space = line.find(' ');
    committed[line.substr(0, space)] = line.substr(space + 1);
  }
  for (const auto& [op, kernels] : table()) {
    const auto found = committed.find(op);
    EXPECT_EQ(kernels, found == committed.end() ? kDefault : found->second) << op;
  }
  for (const auto& [op, kernels] : committed)
    EXPECT_TRUE(table().contains(op)) << op << " is in the table and not in torch";
}

TEST_F(DispatchTable, HasKernelsOfItsOwn) {
  for (const char* op : {"empty.memory_format", "empty_strided"})
    EXPECT_EQ(table().at(absl::StrCat("aten::", op)), "ours ours") << op;
  for (const char* op :
       {"as_strided", "view", "slice.Tensor", "select.int", "unfold", "_reshape_alias"}) {
    EXPECT_EQ(table().at(absl::StrCat("aten::", op)), "fallthrough ours") << op;
  }
  for (const char* op : {"copy_", "_to_copy", "clone", "cat", "stack", "fill_.Scalar", "zero_"})
    EXPECT_EQ(table().at(absl::StrCat("aten::", op)), "ours fallback") << op;
}

// Structured operators must not end in the composite kernel that asks for data pointers.
TEST_F(DispatchTable, NoStockKernelTakesTensorsOnTheDevice) {
  for (const char* op :
       {"add.Tensor", "exp", "mul_.Tensor", "where.self", "index.Tensor", "sum.dim_IntList"})
    EXPECT_EQ(table().at(absl::StrCat("aten::", op)), kDefault) << op;
}

// The operators that a call goes through.
std::vector<std::string> OperatorsOf(const std::function<void()>& call) {
  static thread_local std::vector<std::string>* names = nullptr;
  std::vector<std::string> found;
  names = &found;
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
      [](const at::RecordFunction& f) -> std::unique_ptr<at::ObserverContext> {
        names->emplace_back(f.name());
        return nullptr;
      }));
  call();
  at::removeCallback(handle);
  return found;
}

TEST_F(DispatchTable, NarrowReachesSlice) {
  at::Tensor p = at::zeros({4});
  TracedLoader loader({{"w", {4}, at::kFloat}}, {{"p", p}});
  loader.Begin();
  const at::Tensor w = loader["w"];
  EXPECT_THAT(OperatorsOf([&] { w.narrow(0, 1, 2); }),
              ElementsAre("aten::narrow", "aten::slice", "aten::as_strided"));
}

}  // namespace
}  // namespace loadplan::testing
