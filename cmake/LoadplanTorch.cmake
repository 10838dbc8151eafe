# Finds torch in the Python that runs it, and makes imported targets of its libraries.
#
# Not find_package(Torch): the package of a CUDA wheel insists on a CUDA toolkit, which
# nothing here needs. The target names are ours, so that a host which does call
# find_package(Torch) meets no clash. Installed beside loadplanConfig.cmake, which uses
# it in the consumer's project.
#
# In:   LOADPLAN_TORCH_ROOT, the folder of the torch package; asked of Python where unset.
# Out:  LOADPLAN_TORCH_ROOT, LOADPLAN_TORCH_VERSION (without a local part such as +cu130),
#       loadplan::torch_cpu, loadplan::c10, and both in LOADPLAN_TORCH.

if(NOT LOADPLAN_TORCH_ROOT)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  # find_spec does not import torch, which would take a second and a half.
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -c
            "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE LOADPLAN_TORCH_ROOT
    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  if(NOT LOADPLAN_TORCH_ROOT)
    message(FATAL_ERROR "`${Python3_EXECUTABLE}` has no torch; set Python3_EXECUTABLE to a "
                        "Python that has it, or LOADPLAN_TORCH_ROOT to the folder of the package")
  endif()
endif()

file(STRINGS ${LOADPLAN_TORCH_ROOT}/version.py torch_version REGEX "^__version__ = ")
string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" LOADPLAN_TORCH_VERSION "${torch_version}")
if(LOADPLAN_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "torch ${LOADPLAN_TORCH_VERSION} in ${LOADPLAN_TORCH_ROOT}: 2.11 or newer is needed")
endif()

set(LOADPLAN_TORCH loadplan::torch_cpu loadplan::c10)
foreach(lib torch_cpu c10)
  if(NOT TARGET loadplan::${lib})
    add_library(loadplan::${lib} SHARED IMPORTED)
    set_target_properties(loadplan::${lib} PROPERTIES
      IMPORTED_LOCATION ${LOADPLAN_TORCH_ROOT}/lib/lib${lib}.so)
    target_include_directories(loadplan::${lib} SYSTEM INTERFACE
      ${LOADPLAN_TORCH_ROOT}/include ${LOADPLAN_TORCH_ROOT}/include/torch/csrc/api/include)
    # The wheel is built with NDEBUG; without it the headers check fields that it lacks.
    target_compile_definitions(loadplan::${lib} INTERFACE NDEBUG)
  endif()
endforeach()
