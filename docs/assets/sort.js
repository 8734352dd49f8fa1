// A click on a head of a table with the class "sortable" sorts its rows; a second click turns the order. Empty cells stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const rising = head.ariaSort !== "ascending";
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      return (rising ? 1 : -1) * (isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y);
    };
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
    heads.forEach((each) => { each.ariaSort = each === head ? (rising ? "ascending" : "descending") : "none"; });
  }));
}
