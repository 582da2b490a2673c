"""From a compiled program to the text of one Python module per rank."""

if __name__ != "gemsc.codegen":
    raise ImportError("import gemsc.codegen; the folder codegen/ is a link to it")
