# No object that is compiled for an instruction set may define a weak symbol: the linker keeps one copy of an inline
# function, and must not keep one that some CPUs cannot run.
#   cmake -DNM=nm -DOBJECTS=a.o;b.o -P weak_symbols.cmake
if(NOT OBJECTS)
  message(FATAL_ERROR "no objects to look at")
endif()
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND ${NM} -C --defined-only ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]* [WVu] [^\n]*" weak "${symbols}")
  list(FILTER weak EXCLUDE REGEX "DW\\.ref\\.")  # where the unwinder is: an address, no code
  if(weak)
    list(JOIN weak "\n" weak)
    message(SEND_ERROR "${object} defines weak symbols:\n${weak}")
  endif()
endforeach()
