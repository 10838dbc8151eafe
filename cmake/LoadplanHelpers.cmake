# What every folder's CMakeLists.txt is written in. How things are built is said here,
# what is built is said there.

# What the layers use of Abseil.
set(LOADPLAN_ABSL absl::status absl::statusor absl::strings absl::str_format absl::flat_hash_map
                  absl::flat_hash_set absl::inlined_vector)

# A faster linker and a compiler cache where the machine has them.
function(loadplan_use_fast_tools)
  include(CheckLinkerFlag)
  find_program(LOADPLAN_CCACHE ccache)
  if(LOADPLAN_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    set(CMAKE_CXX_COMPILER_LAUNCHER ${LOADPLAN_CCACHE} PARENT_SCOPE)
  endif()
  foreach(linker mold lld)
    check_linker_flag(CXX -fuse-ld=${linker} LOADPLAN_HAS_${linker})
    if(LOADPLAN_HAS_${linker})
      add_link_options(-fuse-ld=${linker})
      return()
    endif()
  endforeach()
endfunction()

function(loadplan_use_sanitizers sanitizers)
  if(sanitizers)
    add_compile_options(-fsanitize=${sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    add_link_options(-fsanitize=${sanitizers})
  endif()
endfunction()

# Warnings and include roots, for our own targets only.
function(loadplan_add_compile_options)
  add_library(loadplan_compile_options INTERFACE)
  target_compile_options(loadplan_compile_options INTERFACE
    -Wall -Wextra -Wshadow -Wconversion -Wsign-conversion $<$<BOOL:${LOADPLAN_WERROR}>:-Werror>
    # Designated initialisers leave members out on purpose.
    -Wno-missing-field-initializers
    # GCC 12 takes the inline storage of a moved absl::InlinedVector for uninitialised.
    $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  target_include_directories(loadplan_compile_options INTERFACE
    ${PROJECT_SOURCE_DIR} ${PROJECT_BINARY_DIR}/generated)
endfunction()

# The targets of `last` and of every layer below it.
function(loadplan_layers_upto last out)
  set(found)
  foreach(layer IN LISTS LOADPLAN_LAYERS)
    list(APPEND found loadplan::${layer})
    if(layer STREQUAL last)
      break()
    endif()
  endforeach()
  set(${out} ${found} PARENT_SCOPE)
endfunction()

# With LOADPLAN_PCH, torch's headers are parsed once for a tree and not once for a file: builds
# take half the time. A missing #include goes unnoticed with it: the preset dev, wheels and the
# fuzzers do without.
# One for libraries and one for programs, which are compiled with -fPIC and -fPIE.
function(loadplan_use_precompiled_headers target)
  if(NOT LOADPLAN_PCH)
    return()
  endif()
  get_target_property(type ${target} TYPE)
  if(type STREQUAL EXECUTABLE)
    set(pch loadplan_program_pch)
  else()
    set(pch loadplan_library_pch)
  endif()
  if(NOT TARGET ${pch})
    if(type STREQUAL EXECUTABLE)
      add_executable(${pch} EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/cmake/empty.cc)
      target_link_libraries(${pch} PRIVATE GTest::gmock_main)
    else()
      add_library(${pch} OBJECT EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/cmake/empty.cc)
    endif()
    target_link_libraries(${pch} PRIVATE ${LOADPLAN_ABSL} ${LOADPLAN_TORCH} loadplan_compile_options)
    target_precompile_headers(${pch} PRIVATE <ATen/core/Tensor.h> <ATen/core/dispatch/Dispatcher.h>
      <absl/container/flat_hash_map.h> <absl/status/statusor.h> <absl/strings/str_cat.h>)
  endif()
  target_precompile_headers(${target} REUSE_FROM ${pch})
  # Optimising what gmock expands to takes longer than it saves.
  if(type STREQUAL EXECUTABLE)
    target_compile_options(${pch} PRIVATE -O0)
    target_compile_options(${target} PRIVATE -O0)
  endif()
  # ccache looks into precompiled headers with this.
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)
endfunction()

# loadplan_add_layer(plan SOURCES a.cc b.cc LINK <libraries>)
#
# An object library, so that each file is compiled once for the shared library and for
# the tests. Objects do not travel through other object libraries: whoever links a layer
# names those below it too.
function(loadplan_add_layer name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LINK")
  add_library(loadplan_${name} OBJECT ${arg_SOURCES})
  add_library(loadplan::${name} ALIAS loadplan_${name})
  target_link_libraries(loadplan_${name} PUBLIC ${arg_LINK} PRIVATE loadplan_compile_options)
  if(loadplan::torch_cpu IN_LIST arg_LINK)
    loadplan_use_precompiled_headers(loadplan_${name})
  endif()
endfunction()

# loadplan_add_test(plan_test LAYER plan [LABEL unit] [OPTIMISED] SOURCES a_test.cc ...)
#
# One executable of everything up to LAYER. It links the objects, never the shared library:
# with both, every operator would be registered twice. Suites whose name contains
# `Property` get the label `property`, the others LABEL. For one test by name:
# build/release/tests/plan/plan_test --gtest_filter=NAME. OPTIMISED, for programs that run
# long, goes without precompiled headers, whose programs are not.
function(loadplan_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "OPTIMISED" "LAYER;LABEL" "SOURCES")
  if(NOT arg_LABEL)
    set(arg_LABEL unit)
  endif()
  loadplan_layers_upto(${arg_LAYER} layers)
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE ${layers} GTest::gmock_main loadplan_compile_options)
  if(NOT arg_OPTIMISED AND NOT arg_LAYER MATCHES "^(geometry|plan)$")
    loadplan_use_precompiled_headers(${name})
  endif()
  # The same false alarm about moved inline vectors, in its other form.
  target_compile_options(${name} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized>)
  loadplan_register_tests(${name} ${name} "-*Property*" ${arg_LABEL})
  loadplan_register_tests(${name}.properties ${name} "*Property*" property)
endfunction()

# Half of a program's tests for each of two cores. A process per test would spend most of its time
# loading torch: 0.35 s against a few milliseconds of testing.
function(loadplan_register_tests name program filter label)
  foreach(part RANGE 1 2)
    math(EXPR shard "${part} - 1")
    set(test ${name}.${part})
    add_test(NAME ${test} COMMAND ${program} --gtest_filter=${filter} --gtest_brief=1
             --gtest_output=xml:${PROJECT_BINARY_DIR}/gtest/${test}.xml)
    set_tests_properties(${test} PROPERTIES LABELS ${label}
      ENVIRONMENT "GTEST_TOTAL_SHARDS=2;GTEST_SHARD_INDEX=${shard}")
  endforeach()
endfunction()

# loadplan_add_benchmark(plan_build_benchmark LAYER plan)
#
# Built from <name>.cc; runs once, shortly, as a test with the label `bench`.
function(loadplan_add_benchmark name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "LAYER" "")
  loadplan_layers_upto(${arg_LAYER} layers)
  add_executable(${name} ${name}.cc)
  target_link_libraries(${name} PRIVATE ${layers} benchmark::benchmark_main loadplan_compile_options)
  add_test(NAME bench.${name} COMMAND ${name} --benchmark_min_time=0.01)
  set_tests_properties(bench.${name} PROPERTIES LABELS bench)
endfunction()
