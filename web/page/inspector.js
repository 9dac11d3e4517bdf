'use strict';
// Shows what the server sends every second. The rows stay the same elements, so that focus and selection stay.
{
  const find = id => document.getElementById(id);
  const body = document.body, table = find('leases'), list = table.tBodies[0], ask = find('ask');
  const dead = find('died'), title = dead.rows[0];
  const maySteal = body.dataset.access === 'steal', rows = new Map();
  let source, late, asked, seen;

  const set = (element, text) => { if (element.textContent !== text) element.textContent = text; };
  const make = (name, className, parent) => {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (parent) parent.append(element);
    return element;
  };
  const span = ms => {
    const s = Math.floor(ms / 1000);
    return s < 1 ? `${ms} ms` : s < 100 ? `${s} s` : s < 6000 ? `${Math.floor(s / 60)} min`
      : s < 172800 ? `${Math.floor(s / 3600)} h` : `${Math.floor(s / 86400)} d`;
  };
  const known = ms => ms === null ? '' : span(ms);
  const announce = text => set(find('news'), `${new Date().toTimeString().slice(0, 8)} ${text}`);
  // Fences that follow each other get colors that differ.
  const color = fence => `hsl(${Number(BigInt(fence) * 137n % 360n)} var(--tone))`;

  const columns = [['Last 10 min', 'wide']].concat(maySteal ? [['', 'action']] : []);
  for (const [text] of columns) {
    const cell = make('th', '', table.tHead.rows[0]);
    cell.scope = 'col';
    cell.textContent = text;
  }
  title.cells[0].colSpan = table.tHead.rows[0].cells.length;

  function addRow(key) {
    const row = make('tr'), cell = (label, className) => {
      const it = make('td', className, row);
      it.dataset.label = label;
      return it;
    };
    const name = make('th', '', row);
    name.scope = 'row';
    name.textContent = key;
    const it = { row, key, holder: cell('Holder', 'wide'), fence: cell('Fence', 'number'), held: cell('Held', 'number') };
    const left = cell('Left', 'number left');
    it.bar = make('progress', '', left);
    it.bar.setAttribute('aria-label', 'Time left');
    it.left = make('span', '', left);
    it.renewals = cell('Renewals', 'number');
    it.waiting = cell('Waiting', 'number');
    it.lane = make('div', 'lane', cell('Last 10 min', 'wide'));
    it.lane.setAttribute('role', 'img');
    if (maySteal) {
      it.button = make('button', '', cell('', 'wide'));
      it.button.textContent = 'Take…';
      it.button.setAttribute('aria-label', `Take ${key} from its holder`);
      it.button.onclick = () => question(it);
    }
    rows.set(key, it);
    return it;
  }

  function showRow(it, data, view) {
    it.data = data;
    const low = data.state === 'held' && data.left * 3 < data.ttl;
    it.row.className = low ? 'held low' : data.state;
    set(it.holder, data.here ? `${data.holder} (this process)` : data.holder);
    set(it.fence, data.fence);
    set(it.held, known(data.held));
    it.bar.hidden = data.state !== 'held';
    it.bar.max = data.ttl || 1;
    it.bar.value = data.left;
    const left = span(data.left);
    set(it.left, { held: ` ${left}`, kept: `released, kept for ${left}`, died: `died ${left} ago`, free: `free for ${left}`,
      unreadable: `unreadable: ${data.flaw}` }[data.state]);
    set(it.renewals, data.state === 'held' ? String(data.renewals) : '');
    set(it.waiting, String(data.waiting));
    it.waiting.classList.toggle('waits', data.waiting > 0);
    if (it.button) it.button.hidden = data.state !== 'held';
    showLane(it.lane, data, view);
  }

  function showLane(lane, data, view) {
    const begin = view.now - view.span, place = ms => `${Math.max(0, (ms - begin) / view.span * 100)}%`;
    const count = { died: 0, stolen: 0 };
    lane.replaceChildren(...data.lane.flatMap(piece => {
      const hold = make('i'), ended = piece.end === 'died' || piece.end === 'stolen';
      hold.style.left = place(piece.from);
      hold.style.right = `${100 - parseFloat(place(piece.to))}%`;
      hold.style.background = color(piece.fence);
      hold.title = `${piece.holder}, fence ${piece.fence}, for ${span(piece.to - piece.from)}: ${piece.end}`;
      if (!ended) return [hold];
      count[piece.end] += 1;
      const mark = make('b', `mark ${piece.end}`);
      mark.style.left = place(piece.to);
      mark.title = hold.title;
      return [hold, mark];
    }));
    lane.setAttribute('aria-label', `Holders: ${data.lane.length}, died: ${count.died}, taken: ${count.stolen}`);
  }

  function show(view) {
    const before = new Map([...rows].map(([key, it]) => [key, it.data]));
    const groups = new Map(view.rows.map(it => [it.key, it.state === 'died' ? dead : list]));
    if (!seen) { list.replaceChildren(); dead.replaceChildren(title); }
    for (const [key, it] of rows) {
      if (it.row.parentNode !== groups.get(key)) it.row.remove();
      if (!groups.has(key)) rows.delete(key);
    }
    const next = new Map([[list, list.firstElementChild], [dead, title.nextElementSibling]]);
    for (const data of view.rows) {
      const it = rows.get(data.key) || addRow(data.key), group = groups.get(data.key), at = next.get(group);
      showRow(it, data, view);
      if (it.row === at) next.set(group, at.nextElementSibling); else group.insertBefore(it.row, at);
      const old = before.get(data.key);
      if (seen && data.state === 'died' && old && old.state !== 'died') announce(`${data.key}: the holder ${data.holder} died.`);
    }
    const more = view.more ? `, ${view.more} more not shown` : '';
    set(find('summary'), `${view.held} held, ${view.waiting} waiting, ${view.died} died${more}`);
    dead.hidden = dead.rows.length === 1;
    find('empty').hidden = view.rows.length > 0;
    table.hidden = view.rows.length === 0;
    find('legend').hidden = false;
    showSessions(view.sessions);
    seen = view;
  }

  // The same elements as on a page without JavaScript.
  function showSessions(sessions) {
    find('sessions').hidden = !sessions;
    if (!sessions) return;
    const list = find('waits').tBodies[0], notes = find('notes');
    const { lines } = sessions;
    while (list.rows.length > lines.length) list.lastElementChild.remove();
    lines.forEach((line, at) => {
      const row = list.rows[at] || make('tr', '', list);
      const texts = [line.session, known(line.waits), line.lock, known(line.transaction), line.does];
      const labels = ['', 'Waits', 'For', 'Transaction', 'Does'];
      texts.forEach((text, column) => {
        let cell = row.cells[column];
        if (!cell) {
          cell = make(column ? 'td' : 'th', column === 2 || column === 4 ? 'wide' : '', row);
          if (column) cell.dataset.label = labels[column]; else cell.scope = 'row';
        }
        set(cell, text);
      });
    });
    while (notes.children.length > sessions.notes.length) notes.lastElementChild.remove();
    sessions.notes.forEach((note, at) => set(notes.children[at] || make('li', '', notes), note));
    find('nobody').hidden = lines.length > 0 || sessions.notes.length > 0;
  }

  function stale(why) {
    body.classList.add('stale');
    announce(why);
  }

  function connect() {
    if (source) source.close();
    const contains = find('contains').value;
    source = new EventSource(`events?contains=${encodeURIComponent(contains)}`);
    const alive = () => {
      clearTimeout(late);
      late = setTimeout(stale, 5000, 'The service does not answer. Trying again.');
    };
    alive();
    source.addEventListener('leases', event => {
      alive();
      if (body.classList.contains('stale')) {
        body.classList.remove('stale');
        announce('Connected again.');
      }
      show(JSON.parse(event.data));
    });
    source.addEventListener('problem', event => { alive(); stale(JSON.parse(event.data)); });
    // The server ends each connection after some seconds; the browser connects again, unless it was refused.
    source.onerror = event => {
      if (event.target.readyState !== EventSource.CLOSED) return;
      clearTimeout(late);
      stale('The service refuses to show its leases. Load the page again.');
    };
  }

  function question(it) {
    asked = it.data;
    set(find('ask-key'), asked.key);
    set(find('ask-holder'), asked.holder);
    set(find('ask-fence'), asked.fence);
    ask.showModal();
  }

  async function steal({ key, fence }) {
    const headers = { 'Content-Type': 'application/json', 'X-Lockkit': '1' };
    try {
      const answer = await fetch('steal', { method: 'POST', headers, body: JSON.stringify({ key, fence }) });
      const said = await answer.json();
      announce(answer.ok ? `${key} was taken from ${said.holder}.` : `${key}: ${said.error}`);
    } catch {
      announce(`${key}: no answer. The lease may have been taken.`);
    }
  }

  find('cancel').onclick = () => ask.close();
  find('steal').onclick = () => { ask.close(); steal(asked); };
  let typing;
  find('contains').oninput = () => { clearTimeout(typing); typing = setTimeout(connect, 200); };
  connect();
}
