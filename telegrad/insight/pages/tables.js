// Tables that change in place, so that neither the focus nor a reader's place in them is lost.

// columns: {title, cell(row) giving a text, {text, mark} or a node, style: "number", "wide" or "wrap"}; the first names the
// row, and no two rows alike.
export function fill(table, caption, columns, rows) {
  const titles = columns.map((column) => column.title).join("\n");
  if (table.dataset.titles !== titles) {
    table.dataset.titles = titles;
    table.replaceChildren(element("caption"), head(columns), element("tbody"));
  }
  settle(table.caption, caption);
  const body = table.tBodies[0];
  const known = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  rows.forEach((values, index) => {
    const key = textOf(columns[0].cell(values));
    const row = known.get(key) ?? fresh(columns, key);
    known.delete(key);
    if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] ?? null);
    columns.forEach((column, at) => settle(row.cells[at], column.cell(values)));
  });
  for (const row of known.values()) row.remove();
}

// In a frame that scrolls, for the keyboard as well.
export function framed(table, name) {
  const frame = element("div", "scroll");
  frame.tabIndex = 0;
  frame.role = "group";
  frame.ariaLabel = name;
  table.before(frame); // where it stands already
  frame.append(table);
  return frame;
}

function head(columns) {
  const row = element("tr");
  for (const column of columns) {
    const cell = element("th", column.style);
    cell.scope = "col";
    cell.textContent = column.title;
    row.append(cell);
  }
  const found = element("thead");
  found.append(row);
  return found;
}

function fresh(columns, key) {
  const row = element("tr");
  row.dataset.key = key;
  columns.forEach((column, at) => {
    const cell = element(at ? "td" : "th", column.style);
    if (!at) cell.scope = "row";
    row.append(cell);
  });
  return row;
}

function settle(cell, content) {
  if (content instanceof Node) {
    cell.replaceChildren(content);
    return;
  }
  const text = textOf(content);
  if (cell.textContent !== text) cell.textContent = text;
  cell.classList.toggle("bad", content?.mark === true);
}

function textOf(content) {
  return String(content?.text ?? content);
}

function element(name, style = "") {
  const found = document.createElement(name);
  if (style) found.className = style;
  return found;
}
